// SPDX-License-Identifier: Apache-2.0
// Threads that run jobs, with a queue that is bounded in bytes.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "writer/disk.h"
#include "writer/job.h"

namespace clearbox {

using JobId = std::uint64_t;
using Duration = std::chrono::duration<double>;

struct Limits {
  unsigned num_threads = 1;
  /// Bytes of all jobs that have not been done; one larger job is taken alone.
  std::size_t max_bytes = std::size_t{1} << 28;
  std::size_t max_call_bytes = std::size_t{1} << 23;
};

struct Done {
  JobId id;
  Outcome outcome;
};

/// Any thread may call. What a job points to must live until `take` has given the job
/// back, or for good if it never does: a thread that hangs in a system call cannot be
/// stopped, so it is left behind with its job.
class WriterPool {
 public:
  explicit WriterPool(const Limits& limits, std::shared_ptr<Disk> disk);
  WriterPool(const WriterPool&) = delete;
  WriterPool& operator=(const WriterPool&) = delete;
  /// Cancels what has not been done, and waits for no thread that hangs.
  ~WriterPool();

  /// Queues a job under an id that the caller has not used before; false if the queue
  /// stays full for `timeout`, or is closed.
  bool submit(JobId id, Job job, Duration timeout);

  /// True if the job will leave nothing; false if it has committed or is done.
  bool cancel(JobId id);

  /// Jobs that are done; waits up to `timeout` for the first. None if there is none
  /// by then, or there will be none as the pool has closed.
  std::vector<Done> take(Duration timeout);

  /// Works off the queue; false if that takes longer than `timeout`. The jobs left
  /// are cancelled then.
  bool close(Duration timeout);

  /// Bytes of the jobs that have not been done.
  std::size_t held_bytes() const;

 private:
  struct State;

  std::shared_ptr<State> state_;
  std::vector<std::thread> threads_;
};

}  // namespace clearbox
