// SPDX-License-Identifier: Apache-2.0
// The writer pool on disks that fill up and hang; what Python sees of it is tested in
// tests/v1/capture/consumers/test_native_writers.py.
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "check.h"
#include "writer/faulty_disk.h"
#include "writer/pool.h"

namespace {

using namespace clearbox;
namespace fs = std::filesystem;

constexpr Duration kWait{30};
constexpr std::size_t kEndless = std::size_t{1} << 60;

/// A folder for one test.
class Folder {
 public:
  Folder() {
    std::string pattern = (fs::temp_directory_path() / "writer-XXXXXX").string();
    CHECK(::mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() { fs::remove_all(path_); }

  std::string at(const std::string& name) const { return path_ / name; }
  std::string text(const std::string& name) const {
    std::ifstream file(path_ / name);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::size_t num_files() const {
    std::size_t count = 0;
    for (const auto& entry : fs::recursive_directory_iterator(path_)) {
      count += entry.is_regular_file() ? 1 : 0;
    }
    return count;
  }

 private:
  fs::path path_;
};

const std::string kRows = "the rows";
const std::string kIndex = "the index";

Publication publication(const Folder& folder, const std::string& name) {
  return {.rows_aside = folder.at("aside/own/" + name + ".rows"),
          .rows_name = folder.at(name + ".bin"),
          .rows = {{kRows.data(), 3}, {kRows.data() + 3, kRows.size() - 3}},
          .index_aside = folder.at("aside/own/" + name + ".index"),
          .index_name = folder.at(name + ".json"),
          .index = {kIndex.data(), kIndex.size()},
          .sync = true};
}

std::vector<Done> take(WriterPool& pool, std::size_t count) {
  std::vector<Done> all;
  while (all.size() < count) {
    std::vector<Done> some = pool.take(kWait);
    CHECK(!some.empty());
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

void both_files_appear() {
  const Folder folder;
  WriterPool pool({.num_threads = 2, .max_call_bytes = 2}, std::make_shared<Disk>());
  for (JobId id = 0; id < 20; ++id) {
    CHECK(pool.submit(id, publication(folder, std::to_string(id)), kWait));
  }
  for (const Done& done : take(pool, 20)) CHECK(done.outcome.good());
  CHECK(folder.num_files() == 40);
  CHECK(folder.text("7.bin") == kRows);
  CHECK(folder.text("7.json") == kIndex);
  CHECK(pool.held_bytes() == 0);
  CHECK(pool.close(kWait));
}

void a_full_disk_leaves_nothing() {
  for (std::size_t free = 0; free < kRows.size() + kIndex.size(); ++free) {
    const Folder folder;
    WriterPool pool({}, std::make_shared<FaultyDisk>(free));
    CHECK(pool.submit(0, publication(folder, "a"), kWait));
    CHECK(take(pool, 1).front().outcome.error == ENOSPC);
    CHECK(folder.num_files() == 0);
  }
}

void a_queue_is_bounded_in_bytes_and_jobs_can_be_cancelled() {
  const Folder folder;
  const auto disk = std::make_shared<FaultyDisk>(kEndless);
  disk->hang();
  WriterPool pool({.num_threads = 1, .max_bytes = 40}, disk);
  CHECK(pool.submit(0, publication(folder, "a"), kWait));
  CHECK(pool.submit(1, publication(folder, "b"), kWait));
  CHECK(!pool.submit(2, publication(folder, "c"), Duration(0.02)));
  CHECK(pool.cancel(0) && pool.cancel(1) && !pool.cancel(2));
  disk->release();
  for (const Done& done : take(pool, 2)) CHECK(done.outcome.error == ECANCELED);
  CHECK(folder.num_files() == 0);
}

void a_hanging_disk_holds_no_one_up() {
  const Folder folder;
  const auto disk = std::make_shared<FaultyDisk>(kEndless);
  disk->hang();
  {
    WriterPool pool({.num_threads = 1}, disk);
    CHECK(pool.submit(0, publication(folder, "a"), kWait));
    CHECK(!pool.close(Duration(0.05)));
    CHECK(!pool.submit(1, publication(folder, "b"), Duration(0.05)));
  }
  disk->release();
  // The thread outlives its pool; it lets go of the disk when it ends.
  while (disk.use_count() > 1) std::this_thread::yield();
  CHECK(folder.num_files() == 0);
}

}  // namespace

int main() {
  both_files_appear();
  a_full_disk_leaves_nothing();
  a_queue_is_bounded_in_bytes_and_jobs_can_be_cancelled();
  a_hanging_disk_holds_no_one_up();
}
