// SPDX-License-Identifier: Apache-2.0
// A file that grows aside, and the bytes that go into it.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "writer/disk.h"
#include "writer/outcome.h"

namespace clearbox {

/// Bytes that somebody else owns.
struct Bytes {
  const void* data;
  std::size_t size;
};

/// Writes all of `parts` from `offset` on, at most `max_call_bytes` a system call;
/// 0 or an `errno`.
int write_all(Disk& disk, int file, std::span<const Bytes> parts, off_t offset,
              std::size_t max_call_bytes);

/// A new file that is removed again unless `keep` is called.
class FileAside {
 public:
  /// If the folder is gone, it and the one above are made again; not the one above
  /// these: that is the root, which may be a mount point.
  FileAside(Disk& disk, std::string path);
  FileAside(const FileAside&) = delete;
  FileAside& operator=(const FileAside&) = delete;
  ~FileAside();

  /// Writes, syncs if asked to, and closes.
  Outcome fill(std::span<const Bytes> parts, std::size_t max_call_bytes, bool sync);
  void keep() { kept_ = true; }

 private:
  Disk& disk_;
  const std::string path_;
  int file_;
  bool kept_ = false;
};

/// The folder that a path names an entry of.
std::string folder_of(const std::string& path);

}  // namespace clearbox
