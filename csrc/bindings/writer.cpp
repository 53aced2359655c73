// SPDX-License-Identifier: Apache-2.0
// The writer pool for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/buffer.h"
#include "bindings/module.h"
#include "writer/faulty_disk.h"
#include "writer/pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace clearbox {
namespace {

using Buffers = std::vector<Buffer>;
/// Id, `errno` or 0, and the path it is about.
using Answer = std::tuple<JobId, int, std::string>;

constexpr double kMaxSeconds = 1e7;  // more would overflow a clock

Duration seconds(double timeout) {
  return Duration(std::clamp(timeout, 0.0, kMaxSeconds));
}

Buffers buffers_of(const nb::list& objects) {
  Buffers buffers;
  buffers.reserve(objects.size());
  for (const nb::handle object : objects) buffers.emplace_back(object);
  return buffers;
}

std::vector<Bytes> parts_of(const Buffers& buffers, std::size_t count) {
  std::vector<Bytes> parts;
  parts.reserve(count);
  for (std::size_t i = 0; i < count; ++i) parts.push_back(buffers[i].part());
  return parts;
}

/// A pool that keeps the Python objects alive whose memory its jobs read. Every method
/// is called with the GIL; those that wait give it up meanwhile.
class PythonPool {
 public:
  PythonPool(unsigned num_threads, std::size_t max_bytes, std::size_t max_call_bytes,
             std::shared_ptr<FaultyDisk> disk)
      : pool_(
            {num_threads, max_bytes, max_call_bytes},
            disk ? std::shared_ptr<Disk>(std::move(disk)) : std::make_shared<Disk>()) {}

  PythonPool(const PythonPool&) = delete;
  PythonPool& operator=(const PythonPool&) = delete;

  ~PythonPool() {
    pool_.close(Duration::zero());
    // A thread that hangs may still read them: rather lost than freed under it.
    if (!held_.empty()) new std::map<JobId, Buffers>(std::move(held_));
  }

  std::optional<JobId> publish(const std::string& rows_aside,
                               const std::string& rows_name,
                               const std::optional<nb::list>& rows,
                               const std::string& index_aside,
                               const std::string& index_name, nb::handle index,
                               bool replace, bool sync, double timeout) {
    Buffers buffers = rows ? buffers_of(*rows) : Buffers();
    const std::size_t num_rows_parts = buffers.size();
    buffers.emplace_back(index);
    Publication job{.rows_aside = rows_aside,
                    .rows_name = rows_name,
                    .rows = parts_of(buffers, num_rows_parts),
                    .rows_written = !rows.has_value(),
                    .index_aside = index_aside,
                    .index_name = index_name,
                    .index = buffers.back().part(),
                    .replace = replace,
                    .sync = sync};
    return submit(std::move(job), std::move(buffers), timeout);
  }

  std::optional<JobId> append(int file, std::int64_t offset, const nb::list& data,
                              double timeout) {
    Buffers buffers = buffers_of(data);
    Append job{.file = file,
               .offset = static_cast<off_t>(offset),
               .bytes = parts_of(buffers, buffers.size())};
    return submit(std::move(job), std::move(buffers), timeout);
  }

  bool cancel(JobId id) { return pool_.cancel(id); }

  std::vector<Answer> take(double timeout) {
    std::vector<Done> done;
    {
      const Unlocked unlocked;
      done = pool_.take(seconds(timeout));
    }
    std::vector<Answer> answers;
    for (Done& one : done) {
      held_.erase(one.id);
      answers.emplace_back(one.id, one.outcome.error, std::move(one.outcome.path));
    }
    return answers;
  }

  bool close(double timeout) {
    const Unlocked unlocked;
    return pool_.close(seconds(timeout));
  }

  std::size_t held_bytes() const { return pool_.held_bytes(); }

 private:
  std::optional<JobId> submit(Job job, Buffers buffers, double timeout) {
    const JobId id = next_id_++;
    // Before the job is queued: `take` on another thread may be faster than this one.
    held_.emplace(id, std::move(buffers));
    bool queued = false;
    {
      const Unlocked unlocked;
      queued = pool_.submit(id, std::move(job), seconds(timeout));
    }
    if (queued) return id;
    held_.erase(id);
    return std::nullopt;
  }

  WriterPool pool_;
  JobId next_id_ = 1;
  std::map<JobId, Buffers> held_;
};

}  // namespace

void bind_writer(nb::module_& module) {
  nb::class_<FaultyDisk>(module, "FaultyDisk",
                         "A disk for tests: it fills up, or hangs.")
      .def(nb::init<std::size_t>(), "free_bytes"_a)
      .def("hang", &FaultyDisk::hang)
      .def("release", &FaultyDisk::release);
  nb::class_<PythonPool>(module, "WriterPool",
                         "Threads outside the GIL; see csrc/writer/pool.h.")
      .def(nb::init<unsigned, std::size_t, std::size_t, std::shared_ptr<FaultyDisk>>(),
           "num_threads"_a, "max_bytes"_a, "max_call_bytes"_a, "disk"_a = nb::none())
      .def("publish", &PythonPool::publish, "rows_aside"_a, "rows_name"_a,
           "rows"_a.none(), "index_aside"_a, "index_name"_a, "index"_a, "replace"_a,
           "sync"_a, "timeout"_a)
      .def("append", &PythonPool::append, "file"_a, "offset"_a, "data"_a, "timeout"_a)
      .def("cancel", &PythonPool::cancel, "job"_a)
      .def("take", &PythonPool::take, "timeout"_a)
      .def("close", &PythonPool::close, "timeout"_a)
      .def_prop_ro("held_bytes", &PythonPool::held_bytes);
}

}  // namespace clearbox
