// SPDX-License-Identifier: Apache-2.0
#include "writer/faulty_disk.h"

#include <algorithm>
#include <cerrno>
#include <vector>

namespace clearbox {

ssize_t FaultyDisk::write(int file, const iovec* parts, int num_parts, off_t offset) {
  std::unique_lock lock(mutex_);
  released_.wait(lock, [this] { return !hanging_; });
  std::vector<iovec> fitting;
  std::size_t left = free_bytes_;
  for (int i = 0; i < num_parts && left > 0; ++i) {
    const std::size_t taken = std::min(parts[i].iov_len, left);
    fitting.push_back({parts[i].iov_base, taken});
    left -= taken;
  }
  if (fitting.empty()) return -ENOSPC;
  const ssize_t written =
      Disk::write(file, fitting.data(), static_cast<int>(fitting.size()), offset);
  if (written > 0) free_bytes_ -= static_cast<std::size_t>(written);
  return written;
}

void FaultyDisk::hang() {
  const std::lock_guard lock(mutex_);
  hanging_ = true;
}

void FaultyDisk::release() {
  const std::lock_guard lock(mutex_);
  hanging_ = false;
  released_.notify_all();
}

}  // namespace clearbox
