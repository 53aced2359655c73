// SPDX-License-Identifier: Apache-2.0
#include "writer/job.h"

#include <cerrno>
#include <numeric>
#include <optional>

namespace clearbox {
namespace {

std::size_t total(std::span<const Bytes> parts) {
  return std::accumulate(
      parts.begin(), parts.end(), std::size_t{0},
      [](std::size_t sum, const Bytes& part) { return sum + part.size; });
}

/// Gives a file its name, which nobody else may have; an `errno`, or 0.
int move_to_new(Disk& disk, const std::string& aside, const std::string& name) {
  const int linked = disk.link(aside, name);
  if (linked == 0) {
    disk.remove(aside);
    return 0;
  }
  if (linked == -EEXIST) return EEXIST;
  // A file system without links.
  return disk.exists(name) ? EEXIST : -disk.rename(aside, name);
}

/// Gives both files their names; on failure neither has one.
Outcome name_both(const Publication& job, Disk& disk) {
  if (job.replace) {
    // A reader must not find old facts beside new rows.
    if (disk.exists(job.rows_name)) disk.remove(job.index_name);
    const int moved = -disk.rename(job.rows_aside, job.rows_name);
    if (moved != 0) return {moved, job.rows_name};
  } else {
    const int moved = move_to_new(disk, job.rows_aside, job.rows_name);
    if (moved != 0) return {moved, job.rows_name};
  }
  int error = -disk.rename(job.index_aside, job.index_name);
  if (error == 0 && job.sync) {
    error = -disk.sync_folder(folder_of(job.index_name));
    if (error != 0) disk.remove(job.index_name);
  }
  if (error != 0) disk.remove(job.rows_name);
  return {error, job.index_name};
}

/// Removes rows that were written before this job, unless they got their name.
class WrittenRows {
 public:
  WrittenRows(Disk& disk, const std::string& path) : disk_(disk), path_(path) {}
  WrittenRows(const WrittenRows&) = delete;
  WrittenRows& operator=(const WrittenRows&) = delete;
  ~WrittenRows() {
    if (!kept_) disk_.remove(path_);
  }
  void keep() { kept_ = true; }

 private:
  Disk& disk_;
  const std::string& path_;
  bool kept_ = false;
};

Outcome publish(const Publication& job, Permit& permit, Disk& disk,
                std::size_t max_call_bytes) {
  std::optional<FileAside> fresh;
  std::optional<WrittenRows> written;
  if (job.rows_written) {
    written.emplace(disk, job.rows_aside);
  } else {
    fresh.emplace(disk, job.rows_aside);
    const Outcome filled = fresh->fill(job.rows, max_call_bytes, job.sync);
    if (!filled.good()) return filled;
  }
  FileAside index(disk, job.index_aside);
  const Outcome filled = index.fill({&job.index, 1}, max_call_bytes, job.sync);
  if (!filled.good()) return filled;
  if (!permit.commit()) return {ECANCELED, job.rows_name};
  const Outcome named = name_both(job, disk);
  if (named.good()) {
    index.keep();
    if (fresh) fresh->keep();
    if (written) written->keep();
  }
  return named;
}

Outcome append(const Append& job, Permit& permit, Disk& disk,
               std::size_t max_call_bytes) {
  int error = write_all(disk, job.file, job.bytes, job.offset, max_call_bytes);
  if (error == 0 && !permit.commit()) error = ECANCELED;
  if (error != 0) {
    // Best effort: what is left in the range is named by no index.
    disk.punch(job.file, job.offset, static_cast<off_t>(total(job.bytes)));
  }
  return {error, {}};
}

}  // namespace

std::size_t size_of(const Job& job) {
  if (const auto* publication = std::get_if<Publication>(&job)) {
    return total(publication->rows) + publication->index.size;
  }
  return total(std::get<Append>(job).bytes);
}

Outcome run(const Job& job, Permit& permit, Disk& disk, std::size_t max_call_bytes) {
  const auto* publication = std::get_if<Publication>(&job);
  if (permit.cancelled()) {
    // Not begun. Rows that were written before have no other owner.
    if (publication != nullptr && publication->rows_written) {
      disk.remove(publication->rows_aside);
    }
    return {ECANCELED, publication != nullptr ? publication->rows_name : ""};
  }
  return publication != nullptr
             ? publish(*publication, permit, disk, max_call_bytes)
             : append(std::get<Append>(job), permit, disk, max_call_bytes);
}

}  // namespace clearbox
