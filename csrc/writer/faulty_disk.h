// SPDX-License-Identifier: Apache-2.0
// A disk that fills up or hangs when a test says so; everything else is real.
#pragma once

#include <condition_variable>
#include <mutex>

#include "writer/disk.h"

namespace clearbox {

class FaultyDisk : public Disk {
 public:
  /// Takes `free_bytes` more, the last write in part, then fails with ENOSPC.
  explicit FaultyDisk(std::size_t free_bytes) : free_bytes_(free_bytes) {}

  ssize_t write(int file, const iovec* parts, int num_parts, off_t offset) override;

  /// Writes hang from now on, until `release`.
  void hang();
  void release();

 private:
  std::mutex mutex_;
  std::condition_variable released_;
  std::size_t free_bytes_;
  bool hanging_ = false;
};

}  // namespace clearbox
