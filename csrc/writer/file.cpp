// SPDX-License-Identifier: Apache-2.0
#include "writer/file.h"

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

namespace clearbox {
namespace {

constexpr std::size_t kMaxParts = 1024;  // IOV_MAX of Linux

/// Cuts parts into system calls, and takes up where a short write ended.
class Batches {
 public:
  Batches(std::span<const Bytes> parts, std::size_t max_bytes)
      : parts_(parts), max_bytes_(max_bytes) {}

  /// What the next call is to write; empty at the end.
  const std::vector<iovec>& next() {
    batch_.clear();
    std::size_t size = 0;
    std::size_t skipped = done_;
    for (std::size_t i = part_; i < parts_.size() && batch_.size() < kMaxParts; ++i) {
      const std::size_t left = parts_[i].size - std::exchange(skipped, 0);
      const std::size_t taken = std::min(left, max_bytes_ - size);
      if (taken > 0) {
        const auto* from = static_cast<const char*>(parts_[i].data);
        // pwritev takes what it only reads as `void*`.
        batch_.push_back({const_cast<char*>(from + (parts_[i].size - left)), taken});
      }
      size += taken;
      if (size == max_bytes_) break;
    }
    return batch_;
  }

  void wrote(std::size_t size) {
    done_ += size;
    while (part_ < parts_.size() && done_ >= parts_[part_].size) {
      done_ -= parts_[part_++].size;
    }
  }

 private:
  const std::span<const Bytes> parts_;
  const std::size_t max_bytes_;
  std::size_t part_ = 0;
  std::size_t done_ = 0;  // bytes of that part
  std::vector<iovec> batch_;
};

int create(Disk& disk, const std::string& path) {
  const int file = disk.create(path);
  if (file != -ENOENT) return file;
  const std::string folder = folder_of(path);
  disk.make_folder(folder_of(folder));
  disk.make_folder(folder);
  return disk.create(path);
}

}  // namespace

int write_all(Disk& disk, int file, std::span<const Bytes> parts, off_t offset,
              std::size_t max_call_bytes) {
  Batches batches(parts, max_call_bytes);
  while (true) {
    const std::vector<iovec>& batch = batches.next();
    if (batch.empty()) return 0;
    const ssize_t written =
        disk.write(file, batch.data(), static_cast<int>(batch.size()), offset);
    if (written == -EINTR) continue;
    if (written < 0) return static_cast<int>(-written);
    if (written == 0) return EIO;
    offset += written;
    batches.wrote(static_cast<std::size_t>(written));
  }
}

FileAside::FileAside(Disk& disk, std::string path)
    : disk_(disk), path_(std::move(path)), file_(create(disk, path_)) {}

FileAside::~FileAside() {
  if (file_ >= 0) disk_.close(file_);
  if (!kept_ && file_ != -EEXIST) disk_.remove(path_);
}

Outcome FileAside::fill(std::span<const Bytes> parts, std::size_t max_call_bytes,
                        bool sync) {
  if (file_ < 0) return {-file_, path_};
  int error = write_all(disk_, file_, parts, 0, max_call_bytes);
  if (error == 0 && sync) error = -disk_.sync(file_);
  // Some file systems say only now that the disk is full.
  const int closed = -disk_.close(std::exchange(file_, -EBADF));
  if (error == 0) error = closed;
  return {error, path_};
}

std::string folder_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

}  // namespace clearbox
