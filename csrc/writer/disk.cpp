// SPDX-License-Identifier: Apache-2.0
#include "writer/disk.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

namespace clearbox {
namespace {

template <typename T>
T or_errno(T result) {
  return result < 0 ? static_cast<T>(-errno) : result;
}

}  // namespace

int Disk::create(const std::string& path) {
  return or_errno(
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode_t{0644}));
}

ssize_t Disk::write(int file, const iovec* parts, int num_parts, off_t offset) {
  return or_errno(::pwritev(file, parts, num_parts, offset));
}

int Disk::sync(int file) { return or_errno(::fsync(file)); }

int Disk::close(int file) { return or_errno(::close(file)); }

int Disk::rename(const std::string& from, const std::string& to) {
  return or_errno(::rename(from.c_str(), to.c_str()));
}

int Disk::link(const std::string& from, const std::string& to) {
  return or_errno(::link(from.c_str(), to.c_str()));
}

int Disk::remove(const std::string& path) { return or_errno(::unlink(path.c_str())); }

int Disk::make_folder(const std::string& path) {
  return or_errno(::mkdir(path.c_str(), mode_t{0777}));
}

int Disk::sync_folder(const std::string& path) {
  const int folder = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return -errno;
  const int result = sync(folder);
  ::close(folder);
  return result;
}

bool Disk::exists(const std::string& path) {
  struct stat found{};
  return ::lstat(path.c_str(), &found) == 0;
}

int Disk::punch(int file, off_t offset, off_t size) {
#if defined(__linux__)
  return or_errno(
      ::fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, size));
#else
  static_cast<void>(file), static_cast<void>(offset), static_cast<void>(size);
  return -ENOTSUP;
#endif
}

}  // namespace clearbox
