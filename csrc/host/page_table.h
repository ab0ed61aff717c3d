// Which pages of a KV cache hold whose tokens. The cache itself is the caller's tensor: nothing
// here reads or writes it, and nothing waits for a GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace hstu {

// A batch needs more pages than are free or can be had by eviction.
struct OutOfPages : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct PageTableConfig {
  int64_t num_pages = 0;
  int64_t page_size = 0;  // tokens
  bool evict = true;      // whether users in no open step may lose their pages to others
};

struct PageTableStats {
  int64_t free_pages = 0;
  int64_t used_pages = 0;
  int64_t pinned_pages = 0;  // of the used ones, those of users in open steps
  int64_t users = 0;
  int64_t hits = 0;       // users that a released step found with tokens
  int64_t misses = 0;     // users that it found without
  int64_t evictions = 0;  // users evicted
};

struct StepSize {
  int64_t step = 0;    // its number
  int64_t pages = 0;   // of its users, new ones included
  int64_t tokens = 0;  // new
};

// What a step of B users, P pages and N new tokens fills in.
struct StepTables {
  int32_t* page_offsets;    // [B + 1]
  int32_t* page_ids;        // [P]
  int32_t* last_page_lens;  // [B]
  int32_t* cached_lens;     // [B] tokens before the step
  int32_t* slots;           // [N] page * page_size + offset of each new token
};

// Users are in at most one open step each. A user without tokens is the same as an unknown one, and
// is kept only while its step is open. Every method is atomic: it succeeds or changes nothing.
class PageTable {
 public:
  explicit PageTable(const PageTableConfig& config) : config_(config) {
    if (config.page_size < 1) fail("page_size", "a positive count of tokens", config.page_size);
    if (config.num_pages < 1 || config.num_pages > kMaxTokens / config.page_size) {
      fail("num_pages", "from 1 to " + std::to_string(kMaxTokens / config.page_size) + " pages",
           config.num_pages);
    }
    free_.reserve(config.num_pages);
    for (int64_t page = config.num_pages; page-- > 0;) free_.push_back(static_cast<int32_t>(page));
  }

  // Opens a step: finds room for the new tokens of all users, evicting others if need be, and pins
  // the users until the step is released or rolled back. `cached_lens`, or null, is what the caller
  // believes to be cached of each user.
  StepSize begin(const int64_t* users, const int64_t* new_tokens, const int64_t* cached_lens,
                 int64_t batch) {
    const Lock lock(mutex_);
    const int64_t number = next_step_++;
    Step& step = open_[number];
    try {
      enrol(step, number, users, new_tokens, cached_lens, batch);
      reserve(step);
    } catch (...) {
      close(number, step);
      throw;
    }
    // From here on, nothing throws.
    for (const Member& member : step.members) take_from_lru(*member.user);
    while (pages_free() < step.new_pages) evict(*oldest_);
    for (const Member& member : step.members) {
      User& user = *member.user;
      user.length += member.new_tokens;
      for (int64_t n = pages_of(user.length) - user.pages_held(); n > 0; --n) {
        user.pages.push_back(free_.back());
        free_.pop_back();
      }
      pinned_pages_ += user.pages_held();
      step.pages += user.pages_held();
      step.tokens += member.new_tokens;
    }
    return {number, step.pages, step.tokens};
  }

  // Fills in the tables of an open step.
  void write_tables(int64_t number, const StepTables& tables) const {
    const Lock lock(mutex_);
    const int32_t page_size = static_cast<int32_t>(config_.page_size);
    int32_t* page_id = tables.page_ids;
    int32_t* slot = tables.slots;
    int64_t b = 0;
    tables.page_offsets[0] = 0;
    for (const Member& member : find_step(number).members) {
      const User& user = *member.user;
      page_id = std::copy(user.pages.begin(), user.pages.end(), page_id);
      tables.page_offsets[b + 1] = static_cast<int32_t>(page_id - tables.page_ids);
      tables.last_page_lens[b] = user.length ? (user.length - 1) % page_size + 1 : 0;
      tables.cached_lens[b] = member.cached();
      ++b;
      for (int32_t token = member.cached(); token < user.length;) {
        const int32_t offset = token % page_size;
        const int32_t run = std::min(page_size - offset, user.length - token);
        const int32_t first = user.pages[token / page_size] * page_size + offset;
        for (int32_t i = 0; i < run; ++i) *slot++ = first + i;
        token += run;
      }
    }
  }

  // Closes a step and keeps its tokens. Its users are now the most recently used ones, the last of
  // the batch most recently.
  void release(int64_t number) {
    const Lock lock(mutex_);
    Step& step = find_step(number);
    for (const Member& member : step.members) ++(member.cached() ? stats_.hits : stats_.misses);
    finish(number, step);
  }

  // Closes a step and drops its tokens: users are as long as they were, and own the pages that they
  // owned. Users evicted for it stay evicted.
  void roll_back(int64_t number) {
    const Lock lock(mutex_);
    Step& step = find_step(number);
    for (const Member& member : step.members) {
      User& user = *member.user;
      user.length -= member.new_tokens;
      while (user.pages_held() > pages_of(user.length)) {
        free_.push_back(user.pages.back());
        user.pages.pop_back();
        --pinned_pages_;
      }
    }
    finish(number, step);
  }

  // Tokens of each user, new ones of open steps included; 0 for an unknown user.
  void lookup(const int64_t* users, int64_t batch, int32_t* lengths) const {
    const Lock lock(mutex_);
    for (int64_t b = 0; b < batch; ++b) {
      const auto found = users_.find(users[b]);
      lengths[b] = found == users_.end() ? 0 : found->second.length;
    }
  }

  // A user's pages, in order.
  std::vector<int32_t> pages(int64_t user) const {
    const Lock lock(mutex_);
    const auto found = users_.find(user);
    return found == users_.end() ? std::vector<int32_t>() : found->second.pages;
  }

  // Forgets users, known or not.
  void free(const int64_t* users, int64_t batch) {
    const Lock lock(mutex_);
    for (int64_t b = 0; b < batch; ++b) {
      const auto found = users_.find(users[b]);
      if (found != users_.end() && found->second.step) fail("users", kNotInStep, users[b]);
    }
    for (int64_t b = 0; b < batch; ++b) {
      const auto found = users_.find(users[b]);
      if (found != users_.end()) drop(found->second);
    }
  }

  // Forgets all users.
  void clear() {
    const Lock lock(mutex_);
    if (!open_.empty()) fail("clear", "no open step", open_.size());
    while (oldest_) drop(*oldest_);
  }

  PageTableStats stats() const {
    const Lock lock(mutex_);
    PageTableStats stats = stats_;
    stats.free_pages = pages_free();
    stats.used_pages = config_.num_pages - stats.free_pages;
    stats.pinned_pages = pinned_pages_;
    stats.users = static_cast<int64_t>(users_.size());
    return stats;
  }

 private:
  using Lock = std::lock_guard<std::mutex>;

  static constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();  // slots are int32
  static constexpr const char* kNotInStep = "users in no open step";

  // In the list of least recent use if it is in no open step.
  struct User {
    int64_t id = 0;
    int64_t step = 0;  // the open step that pins it, or 0
    int32_t length = 0;
    std::vector<int32_t> pages;
    User* older = nullptr;
    User* newer = nullptr;

    int64_t pages_held() const { return static_cast<int64_t>(pages.size()); }
  };

  struct Member {
    User* user;  // stays where it is: users_ is a map of nodes
    int32_t new_tokens;

    int32_t cached() const { return user->length - new_tokens; }  // once the step is open
  };

  struct Step {
    std::vector<Member> members;
    int64_t new_pages = 0;
    int64_t pages = 0;
    int64_t tokens = 0;
  };

  template <class T>
  [[noreturn]] static void fail(const char* name, const std::string& expected, T got) {
    throw std::invalid_argument(std::string(name) + ": expected " + expected + ", got " +
                                std::to_string(got));
  }

  int64_t pages_of(int64_t tokens) const {
    return (tokens + config_.page_size - 1) / config_.page_size;
  }
  int64_t pages_free() const { return static_cast<int64_t>(free_.size()); }

  Step& find_step(int64_t number) {
    const auto found = open_.find(number);
    if (found == open_.end()) fail("step", "an open step", number);
    return found->second;
  }
  const Step& find_step(int64_t number) const {
    return const_cast<PageTable*>(this)->find_step(number);
  }

  // Marks the users as the step's. What it throws half way, close() undoes.
  void enrol(Step& step, int64_t number, const int64_t* users, const int64_t* new_tokens,
             const int64_t* cached_lens, int64_t batch) {
    step.members.reserve(batch);
    int64_t own_pages = 0;
    for (int64_t b = 0; b < batch; ++b) {
      if (new_tokens[b] < 0 || new_tokens[b] > kMaxTokens) {
        fail("new_tokens", "counts from 0 to " + std::to_string(kMaxTokens), new_tokens[b]);
      }
      User& user = users_[users[b]];
      if (user.step == number) fail("users", "each user once", users[b]);
      if (user.step) fail("users", kNotInStep, users[b]);
      user.id = users[b];
      user.step = number;
      step.members.push_back({&user, static_cast<int32_t>(new_tokens[b])});
      if (cached_lens && cached_lens[b] != user.length) {
        fail("cached_lens",
             std::to_string(user.length) + " tokens of user " + std::to_string(user.id),
             cached_lens[b]);
      }
      step.new_pages += pages_of(user.length + new_tokens[b]) - user.pages_held();
      own_pages += user.pages_held();
    }
    const int64_t unpinned = config_.num_pages - pages_free() - pinned_pages_;
    const int64_t available = pages_free() + (config_.evict ? unpinned - own_pages : 0);
    if (step.new_pages > available) {
      throw OutOfPages("num_pages: expected " + std::to_string(step.new_pages) +
                       (config_.evict ? " free or evictable" : " free") +
                       " pages for the new tokens, got " + std::to_string(available) + " of " +
                       std::to_string(config_.num_pages));
    }
  }

  // Memory for the page lists, so that nothing throws once pages move.
  void reserve(Step& step) {
    for (const Member& member : step.members) {
      User& user = *member.user;
      const size_t wanted = pages_of(int64_t{user.length} + member.new_tokens);
      if (wanted > user.pages.capacity()) {
        user.pages.reserve(std::max(wanted, 2 * user.pages.capacity()));
      }
    }
  }

  // Unpins a step's users and forgets those without tokens.
  void close(int64_t number, Step& step) {
    for (const Member& member : step.members) {
      member.user->step = 0;
      if (!member.user->length) users_.erase(member.user->id);
    }
    open_.erase(number);
  }

  void finish(int64_t number, Step& step) {
    for (const Member& member : step.members) {
      pinned_pages_ -= member.user->pages_held();
      if (member.user->length) add_to_lru(*member.user);
    }
    close(number, step);
  }

  void add_to_lru(User& user) {
    user.older = newest_;
    user.newer = nullptr;
    (newest_ ? newest_->newer : oldest_) = &user;
    newest_ = &user;
  }

  void take_from_lru(User& user) {
    if (!user.length) return;  // it is new
    (user.older ? user.older->newer : oldest_) = user.newer;
    (user.newer ? user.newer->older : newest_) = user.older;
  }

  void evict(User& user) {
    drop(user);
    ++stats_.evictions;
  }

  void drop(User& user) {
    take_from_lru(user);
    free_.insert(free_.end(), user.pages.rbegin(), user.pages.rend());
    users_.erase(user.id);
  }

  const PageTableConfig config_;
  mutable std::mutex mutex_;
  std::unordered_map<int64_t, User> users_;
  std::unordered_map<int64_t, Step> open_;
  std::vector<int32_t> free_;  // a stack; its memory is for all pages
  User* oldest_ = nullptr;
  User* newest_ = nullptr;
  int64_t pinned_pages_ = 0;
  int64_t next_step_ = 1;
  PageTableStats stats_;
};

}  // namespace hstu
