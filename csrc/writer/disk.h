// SPDX-License-Identifier: Apache-2.0
// What the writers ask of a file system. Calls return what the system call returns, or
// the negative `errno`. Tests put in disks that fill up or hang.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <string>

namespace clearbox {

class Disk {
 public:
  Disk() = default;
  Disk(const Disk&) = delete;
  Disk& operator=(const Disk&) = delete;
  virtual ~Disk() = default;

  /// A new file, open for writing; -EEXIST if there is one.
  virtual int create(const std::string& path);
  virtual ssize_t write(int file, const iovec* parts, int num_parts, off_t offset);
  virtual int sync(int file);
  virtual int close(int file);
  virtual int rename(const std::string& from, const std::string& to);
  virtual int link(const std::string& from, const std::string& to);
  virtual int remove(const std::string& path);
  virtual int make_folder(const std::string& path);
  virtual int sync_folder(const std::string& path);
  virtual bool exists(const std::string& path);
  /// Gives the space of a range back; what it holds then is zeros.
  virtual int punch(int file, off_t offset, off_t size);
};

}  // namespace clearbox
