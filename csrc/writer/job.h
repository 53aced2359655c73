// SPDX-License-Identifier: Apache-2.0
// What a writer thread does in one go.
#pragma once

#include <atomic>
#include <string>
#include <variant>
#include <vector>

#include "writer/file.h"

namespace clearbox {

/// Rows and the index that describes them, to appear under their names together:
/// rows first, so who sees the index can read the rows.
struct Publication {
  std::string rows_aside;
  std::string rows_name;
  std::vector<Bytes> rows;
  /// The file aside is complete already; `rows` is empty.
  bool rows_written = false;
  std::string index_aside;
  std::string index_name;
  Bytes index{};
  /// Whether rows of that name are replaced; else that is EEXIST.
  bool replace = true;
  bool sync = false;
};

/// Bytes at an offset of an open file, which others append to at the same time.
struct Append {
  int file = -1;
  off_t offset = 0;
  std::vector<Bytes> bytes;
};

using Job = std::variant<Publication, Append>;

std::size_t size_of(const Job& job);

/// Whether a job may still take effect. Somebody may cancel it at any time until it
/// commits: from then on it runs to its end.
class Permit {
 public:
  /// True if the job did not commit before; it will leave nothing then.
  bool cancel() { return settle(State::kCancelled) == State::kCancelled; }
  /// True if the job was not cancelled before.
  bool commit() { return settle(State::kCommitted) == State::kCommitted; }
  bool cancelled() const { return state_.load() == State::kCancelled; }

 private:
  enum class State { kOpen, kCommitted, kCancelled };

  State settle(State wanted) {
    State found = State::kOpen;
    return state_.compare_exchange_strong(found, wanted) ? wanted : found;
  }

  std::atomic<State> state_{State::kOpen};
};

/// Does the job. If it fails or is cancelled (ECANCELED) nothing of it is left, except
/// zeros in the range of an `Append`.
Outcome run(const Job& job, Permit& permit, Disk& disk, std::size_t max_call_bytes);

}  // namespace clearbox
