// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <span>
#include <utility>

#include "bindings/unlocked.h"

namespace clearbox {

/// Contiguous memory of a Python object, which is kept alive. Must be constructed,
/// moved and destroyed with the GIL held; the memory may be accessed without it.
class Buffer {
 public:
  explicit Buffer(nanobind::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) {
      throw nanobind::python_error();
    }
  }
  Buffer(Buffer&& other) noexcept : view_(std::exchange(other.view_, {})) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer& operator=(Buffer&&) = delete;
  ~Buffer() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }

  std::span<const std::byte> bytes() const {
    return {static_cast<const std::byte*>(view_.buf), size()};
  }
  std::size_t size() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

/// A new `bytes` object of `size` bytes. `fill` is called without the GIL to write
/// them.
template <typename Fill>
nanobind::bytes filled_bytes(std::size_t size, Fill fill) {
  PyObject* object = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
  if (object == nullptr) throw nanobind::python_error();
  auto result = nanobind::steal<nanobind::bytes>(object);
  auto* out = reinterpret_cast<std::byte*>(PyBytes_AsString(object));
  {
    const Unlocked unlocked;
    fill(out);
  }
  return result;
}

}  // namespace clearbox
