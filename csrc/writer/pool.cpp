// SPDX-License-Identifier: Apache-2.0
#include "writer/pool.h"

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>

namespace clearbox {
namespace {

struct Ticket {
  Ticket(JobId number, Job what)
      : id(number), job(std::move(what)), size(size_of(job)) {}

  const JobId id;
  const Job job;
  const std::size_t size;
  Permit permit;
};

/// Nothing may leave a thread but an outcome.
Outcome run_guarded(Ticket& ticket, Disk& disk, std::size_t max_call_bytes) noexcept {
  try {
    return run(ticket.job, ticket.permit, disk, max_call_bytes);
  } catch (const std::bad_alloc&) {
    return {ENOMEM, {}};
  } catch (...) {
    return {EIO, {}};
  }
}

}  // namespace

/// Shared with the threads, as one that hangs outlives the pool.
struct WriterPool::State {
  State(const Limits& bounds, std::shared_ptr<Disk> target)
      : limits(bounds), disk(std::move(target)) {}

  const Limits limits;
  const std::shared_ptr<Disk> disk;

  std::mutex mutex;
  std::condition_variable has_work;
  std::condition_variable has_room;
  std::condition_variable has_done;
  std::condition_variable has_ended;
  // Below: under the mutex.
  std::deque<std::shared_ptr<Ticket>> queue;
  std::unordered_map<JobId, std::shared_ptr<Ticket>> unfinished;
  std::vector<Done> done;
  std::size_t bytes = 0;
  unsigned running = 0;
  bool closing = false;

  bool fits(std::size_t size) const {
    return unfinished.empty() || bytes + size <= limits.max_bytes;
  }

  void work() {
    std::unique_lock lock(mutex);
    while (true) {
      has_work.wait(lock, [this] { return closing || !queue.empty(); });
      if (queue.empty()) break;
      const std::shared_ptr<Ticket> ticket = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      Outcome outcome = run_guarded(*ticket, *disk, limits.max_call_bytes);
      lock.lock();
      bytes -= ticket->size;
      unfinished.erase(ticket->id);
      done.push_back({ticket->id, std::move(outcome)});
      has_room.notify_all();
      has_done.notify_all();
    }
    --running;
    has_ended.notify_all();
    has_done.notify_all();
  }
};

WriterPool::WriterPool(const Limits& limits, std::shared_ptr<Disk> disk)
    : state_(std::make_shared<State>(limits, std::move(disk))) {
  for (unsigned i = 0; i < limits.num_threads; ++i) {
    {
      const std::lock_guard lock(state_->mutex);
      ++state_->running;
    }
    threads_.emplace_back([state = state_] { state->work(); });
  }
}

WriterPool::~WriterPool() { close(Duration::zero()); }

bool WriterPool::submit(JobId id, Job job, Duration timeout) {
  auto ticket = std::make_shared<Ticket>(id, std::move(job));
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  const bool ready = state.has_room.wait_for(
      lock, timeout, [&] { return state.closing || state.fits(ticket->size); });
  if (!ready || state.closing) return false;
  state.bytes += ticket->size;
  state.unfinished.emplace(id, ticket);
  state.queue.push_back(std::move(ticket));
  state.has_work.notify_one();
  return true;
}

bool WriterPool::cancel(JobId id) {
  const std::lock_guard lock(state_->mutex);
  const auto found = state_->unfinished.find(id);
  return found != state_->unfinished.end() && found->second->permit.cancel();
}

std::vector<Done> WriterPool::take(Duration timeout) {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  state.has_done.wait_for(lock, timeout,
                          [&] { return !state.done.empty() || state.running == 0; });
  return std::exchange(state.done, {});
}

bool WriterPool::close(Duration timeout) {
  bool ended = false;
  {
    std::unique_lock lock(state_->mutex);
    state_->closing = true;
    state_->has_work.notify_all();
    state_->has_room.notify_all();
    const auto all_ended = [this] { return state_->running == 0; };
    ended = state_->has_ended.wait_for(lock, timeout, all_ended);
    if (!ended) {
      for (const auto& [id, ticket] : state_->unfinished) ticket->permit.cancel();
    }
  }
  for (std::thread& thread : threads_) {
    if (ended) {
      thread.join();
    } else {
      thread.detach();
    }
  }
  threads_.clear();
  return ended;
}

std::size_t WriterPool::held_bytes() const {
  const std::lock_guard lock(state_->mutex);
  return state_->bytes;
}

}  // namespace clearbox
