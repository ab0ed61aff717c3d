// Which pages of a KV cache hold whose tokens, in the memory of the device and, if there is such a
// tier, of the host. The pages themselves are the caller's tensors: nothing here reads or writes
// them, and nothing waits for a GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../common/math.h"

namespace hstu {

// A batch needs more pages than are free or can be had by eviction.
struct OutOfPages : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct PageTableConfig {
  int64_t num_pages = 0;
  int64_t page_size = 0;   // tokens
  bool evict = true;       // whether users in no open step may lose their pages to others
  int64_t host_pages = 0;  // of the tier in host memory, which takes users who are evicted
};

struct PageTableStats {
  int64_t free_pages = 0;
  int64_t used_pages = 0;
  int64_t pinned_pages = 0;  // of the used ones, those of users in open steps
  int64_t users = 0;
  int64_t hits = 0;       // users that a released step found with tokens
  int64_t misses = 0;     // users that it found without
  int64_t evictions = 0;  // users who lost their device pages
  int64_t free_host_pages = 0;
  int64_t used_host_pages = 0;
  int64_t host_users = 0;       // whose tokens are on the host alone, but for the next ones:
  int64_t returning_users = 0;  // on their way back, in open steps
  int64_t host_hits = 0;        // of the hits, those that came back from the host
  int64_t losses = 0;  // users who lost their tokens: evicted, and with no room on the host
  int64_t pages_to_host = 0;
  int64_t pages_from_host = 0;
};

struct StepSize {
  int64_t step = 0;    // its number
  int64_t pages = 0;   // of its users, new ones included
  int64_t tokens = 0;  // to write
};

// What a step of B users, P pages and N tokens to write fills in: of each user those that are
// written again, then the new ones.
struct StepTables {
  int32_t* page_offsets;    // [B + 1]
  int32_t* page_ids;        // [P]
  int32_t* last_page_lens;  // [B]
  int32_t* cached_lens;     // [B] tokens from before the step that stay as they are
  int32_t* slots;           // [N] page * page_size + offset of each token to write
};

// Pages to copy from one tier to the other, in pairs.
struct PageMoves {
  std::vector<int64_t> device;
  std::vector<int64_t> host;

  void add(int64_t device_page, int64_t host_page) {
    device.push_back(device_page);
    host.push_back(host_page);
  }
};

// Users are in at most one open step each. A user without tokens is the same as an unknown one, and
// is kept only while its step is open. Every method is atomic: it succeeds or changes nothing.
//
// With a tier on the host, a user in no open step is in one tier or the other. A step brings back
// those of its users who are on the host; they hold pages in both tiers until it is closed, so that
// rolling it back needs no copy. The copies that a step asks for (`moves`) must be made, or put in
// the order of the copies to come, before the next step begins; else the step must be cancelled.
class PageTable {
 public:
  explicit PageTable(const PageTableConfig& config) : config_(checked(config)) {}

  // Opens a step: finds room for the new tokens of all users, evicting others if need be, and pins
  // the users until the step is released or rolled back. `cached_lens`, or null, is what the caller
  // believes to be cached of each user; `rewritten`, or null, how many of a user's last cached
  // tokens are written again.
  StepSize begin(const int64_t* users, const int64_t* new_tokens, const int64_t* cached_lens,
                 const int64_t* rewritten, int64_t batch) {
    const Lock lock(mutex_);
    const int64_t number = next_step_++;
    Step& step = open_[number];
    std::vector<Victim> victims;
    try {
      enrol(step, number, users, new_tokens, cached_lens, rewritten, batch);
      victims = choose_victims(step);
      reserve(step, victims);
    } catch (...) {
      close(number, step);
      throw;
    }
    // From here on, nothing throws.
    for (const Member& member : step.members) {
      User& user = *member.user;
      tier_of(user).take(user);
      host_.pinned_pages += size_of(user.host_pages);
      stats_.returning_users += !user.host_pages.empty();
    }
    evict(victims, step);
    for (const Member& member : step.members) {
      User& user = *member.user;
      user.length += member.new_tokens;
      device_.extend(user.pages, pages_of(user.length) - size_of(user.pages));
      device_.pinned_pages += size_of(user.pages);
      step.pages += size_of(user.pages);
      step.tokens += user.length - member.kept();
    }
    stats_.pages_to_host += step.evicted_pages;
    stats_.pages_from_host += step.returning_pages;
    return {number, step.pages, step.tokens};
  }

  // The pages of users that an open step evicted, to copy to the host, and of those that it brings
  // back, to copy to the device. A page of the device may be among both: it must be read for the
  // first before it is written for the second. No page of the host is.
  std::pair<PageMoves, PageMoves> moves(int64_t number) const {
    const Lock lock(mutex_);
    const Step& step = find_step(number);
    PageMoves returned;
    for (const Member& member : step.members) {
      const User& user = *member.user;
      for (size_t n = 0; n < user.host_pages.size(); ++n) {
        returned.add(user.pages[n], user.host_pages[n]);
      }
    }
    return {step.evicted, returned};
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
      tables.cached_lens[b] = member.kept();
      ++b;
      for (int32_t token = member.kept(); token < user.length;) {
        const int32_t offset = token % page_size;
        const int32_t run = std::min(page_size - offset, user.length - token);
        const int32_t first = user.pages[token / page_size] * page_size + offset;
        for (int32_t i = 0; i < run; ++i) *slot++ = first + i;
        token += run;
      }
    }
  }

  // Closes a step and keeps its tokens. Its users are now the most recently used ones, the last of
  // the batch most recently; none is on the host.
  void release(int64_t number) {
    const Lock lock(mutex_);
    Step& step = find_step(number);
    for (const Member& member : step.members) {
      User& user = *member.user;
      ++(member.cached() ? stats_.hits : stats_.misses);
      stats_.host_hits += !user.host_pages.empty();
      stats_.returning_users -= !user.host_pages.empty();
      host_.pinned_pages -= size_of(user.host_pages);
      host_.shorten(user.host_pages, 0);
    }
    finish(number, step);
  }

  // Closes a step and drops its tokens: users are as long as they were, own the pages that they
  // owned, and are where they were, as the most recently used ones there. Users evicted for it stay
  // evicted.
  void roll_back(int64_t number) {
    const Lock lock(mutex_);
    undo(number, find_step(number));
  }

  // The same for a step whose copies could not be made: users whom it evicted are forgotten.
  void cancel(int64_t number) {
    const Lock lock(mutex_);
    Step& step = find_step(number);
    for (const int64_t id : step.evicted_users) {
      const auto found = users_.find(id);  // unless it has been freed
      if (found != users_.end() && found->second.on_host()) lose(found->second);
    }
    stats_.pages_to_host -= step.evicted_pages;
    stats_.pages_from_host -= step.returning_pages;
    undo(number, step);
  }

  // Tokens of each user, new ones of open steps included; 0 for an unknown user.
  void lookup(const int64_t* users, int64_t batch, int32_t* lengths) const {
    const Lock lock(mutex_);
    for (int64_t b = 0; b < batch; ++b) {
      const auto found = users_.find(users[b]);
      lengths[b] = found == users_.end() ? 0 : found->second.length;
    }
  }

  // A user's pages on the device, in order.
  std::vector<int32_t> pages(int64_t user) const {
    const Lock lock(mutex_);
    const auto found = users_.find(user);
    return found == users_.end() ? std::vector<int32_t>() : found->second.pages;
  }

  // A user's pages on the host, in order.
  std::vector<int32_t> host_pages(int64_t user) const {
    const Lock lock(mutex_);
    const auto found = users_.find(user);
    return found == users_.end() ? std::vector<int32_t>() : found->second.host_pages;
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
    while (device_.oldest) drop(*device_.oldest);
    while (host_.oldest) drop(*host_.oldest);
  }

  PageTableStats stats() const {
    const Lock lock(mutex_);
    PageTableStats stats = stats_;
    stats.free_pages = size_of(device_.free);
    stats.used_pages = config_.num_pages - stats.free_pages;
    stats.pinned_pages = device_.pinned_pages;
    stats.users = size_of(users_);
    stats.free_host_pages = size_of(host_.free);
    stats.used_host_pages = config_.host_pages - stats.free_host_pages;
    stats.host_users = host_.users;
    return stats;
  }

 private:
  using Lock = std::lock_guard<std::mutex>;

  static constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();  // slots are int32
  static constexpr const char* kNotInStep = "users in no open step";

  // In its tier's list of least recent use if it is in no open step.
  struct User {
    int64_t id = 0;
    int64_t step = 0;  // the open step that pins it, or 0
    int32_t length = 0;
    std::vector<int32_t> pages;
    std::vector<int32_t> host_pages;
    User* older = nullptr;
    User* newer = nullptr;

    bool on_host() const { return pages.empty() && !host_pages.empty(); }
  };

  // The pages of one memory, and the users in no open step who have theirs there.
  struct Tier {
    std::vector<int32_t> free;  // a stack; its memory is for all pages
    int64_t pinned_pages = 0;   // of users in open steps
    int64_t users = 0;          // in the list
    User* oldest = nullptr;
    User* newest = nullptr;

    explicit Tier(int64_t num_pages) {
      free.reserve(num_pages);
      for (int64_t page = num_pages; page-- > 0;) free.push_back(static_cast<int32_t>(page));
    }

    // Adds free pages at the end of a user's, which have the memory for them.
    void extend(std::vector<int32_t>& pages, int64_t count) {
      for (; count > 0; --count) {
        pages.push_back(free.back());
        free.pop_back();
      }
    }

    // Frees a user's pages after the first `count`.
    void shorten(std::vector<int32_t>& pages, int64_t count) {
      for (; size_of(pages) > count; pages.pop_back()) free.push_back(pages.back());
    }

    void add(User& user) {
      user.older = newest;
      user.newer = nullptr;
      (newest ? newest->newer : oldest) = &user;
      newest = &user;
      ++users;
    }

    void take(User& user) {
      if (!user.length) return;  // it is new
      (user.older ? user.older->newer : oldest) = user.newer;
      (user.newer ? user.newer->older : newest) = user.older;
      --users;
    }
  };

  struct Member {
    User* user;  // stays where it is: users_ is a map of nodes
    int32_t new_tokens;
    int32_t rewritten;

    // Once the step is open:
    int32_t cached() const { return user->length - new_tokens; }
    int32_t kept() const { return cached() - rewritten; }
  };

  struct Step {
    std::vector<Member> members;
    int64_t new_pages = 0;
    int64_t returning_pages = 0;  // of members that it brings back
    int64_t evicted_pages = 0;    // of others whom it moves to the host
    int64_t pages = 0;
    int64_t tokens = 0;
    PageMoves evicted;
    std::vector<int64_t> evicted_users;
  };

  struct Victim {
    User* user;
    bool to_host;
  };

  template <class T>
  [[noreturn]] static void fail(const char* name, const std::string& expected, T got) {
    throw std::invalid_argument(std::string(name) + ": expected " + expected + ", got " +
                                std::to_string(got));
  }

  template <class Container>
  static int64_t size_of(const Container& container) {
    return static_cast<int64_t>(container.size());
  }

  static const PageTableConfig& checked(const PageTableConfig& config) {
    if (config.page_size < 1) fail("page_size", "a positive count of tokens", config.page_size);
    const int64_t most = kMaxTokens / config.page_size;
    if (config.num_pages < 1 || config.num_pages > most) {
      fail("num_pages", "from 1 to " + std::to_string(most) + " pages", config.num_pages);
    }
    if (config.host_pages < 0 || config.host_pages > most) {
      fail("host_pages", "from 0 to " + std::to_string(most) + " pages", config.host_pages);
    }
    if (config.host_pages && !config.evict) {
      fail("host_pages", "0 where nobody is evicted", config.host_pages);
    }
    return config;
  }

  int64_t pages_of(int64_t tokens) const { return ceil_div(tokens, config_.page_size); }

  Tier& tier_of(const User& user) { return user.on_host() ? host_ : device_; }

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
             const int64_t* cached_lens, const int64_t* rewritten, int64_t batch) {
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
      const int64_t again = rewritten ? rewritten[b] : 0;
      step.members.push_back(
          {&user, static_cast<int32_t>(new_tokens[b]), static_cast<int32_t>(again)});
      if (cached_lens && cached_lens[b] != user.length) {
        fail("cached_lens",
             std::to_string(user.length) + " tokens of user " + std::to_string(user.id),
             cached_lens[b]);
      }
      if (again < 0 || again > user.length) {
        fail("rewritten",
             "counts from 0 to the " + std::to_string(user.length) + " tokens that are cached",
             again);
      }
      step.new_pages += pages_of(user.length + new_tokens[b]) - size_of(user.pages);
      step.returning_pages += size_of(user.host_pages);
      own_pages += size_of(user.pages);
    }
    const int64_t free = size_of(device_.free);
    const int64_t unpinned = config_.num_pages - free - device_.pinned_pages;
    const int64_t available = free + (config_.evict ? unpinned - own_pages : 0);
    if (step.new_pages > available) {
      throw OutOfPages("num_pages: expected " + std::to_string(step.new_pages) +
                       (config_.evict ? " free or evictable" : " free") +
                       " pages for the new tokens, got " + std::to_string(available) + " of " +
                       std::to_string(config_.num_pages));
    }
  }

  // Users of the device tier, least recently used first, whose pages make the room that enrol() has
  // found to be there; and which of them the host takes: the most recently used ones that fit.
  std::vector<Victim> choose_victims(Step& step) const {
    std::vector<Victim> victims;
    int64_t room = size_of(device_.free);
    for (User* user = device_.oldest; room < step.new_pages; user = user->newer) {
      if (user->step) continue;  // a member of this step
      victims.push_back({user, false});
      room += size_of(user->pages);
    }
    const int64_t host_room = config_.host_pages - host_.pinned_pages - step.returning_pages;
    for (auto victim = victims.rbegin(); victim != victims.rend(); ++victim) {
      const int64_t pages = size_of(victim->user->pages);
      victim->to_host = pages <= host_room - step.evicted_pages;
      if (victim->to_host) step.evicted_pages += pages;
    }
    return victims;
  }

  // Memory for the page lists, so that nothing throws once pages move.
  void reserve(Step& step, const std::vector<Victim>& victims) {
    for (const Member& member : step.members) {
      User& user = *member.user;
      const size_t wanted = pages_of(int64_t{user.length} + member.new_tokens);
      if (wanted > user.pages.capacity()) {
        user.pages.reserve(std::max(wanted, 2 * user.pages.capacity()));
      }
    }
    if (!step.evicted_pages) return;
    step.evicted.device.reserve(step.evicted_pages);
    step.evicted.host.reserve(step.evicted_pages);
    step.evicted_users.reserve(victims.size());
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
      User& user = *member.user;
      device_.pinned_pages -= size_of(user.pages);
      host_.pinned_pages -= size_of(user.host_pages);
      if (user.length) tier_of(user).add(user);
    }
    close(number, step);
  }

  void undo(int64_t number, Step& step) {
    for (const Member& member : step.members) {
      User& user = *member.user;
      user.length -= member.new_tokens;
      stats_.returning_users -= !user.host_pages.empty();
      const int64_t before = size_of(user.pages);
      device_.shorten(user.pages, user.host_pages.empty() ? pages_of(user.length) : 0);
      device_.pinned_pages -= before - size_of(user.pages);
    }
    finish(number, step);
  }

  void evict(const std::vector<Victim>& victims, Step& step) {
    while (size_of(host_.free) < step.evicted_pages) lose(*host_.oldest);
    for (const Victim& victim : victims) {
      victim.to_host ? move_to_host(*victim.user, step) : lose(*victim.user);
    }
    stats_.evictions += size_of(victims);
  }

  void move_to_host(User& user, Step& step) {
    device_.take(user);
    user.host_pages.swap(user.pages);  // the list is as long there
    for (auto page = user.host_pages.rbegin(); page != user.host_pages.rend(); ++page) {
      device_.free.push_back(*page);
    }
    for (int32_t& page : user.host_pages) {
      step.evicted.add(page, host_.free.back());
      page = host_.free.back();
      host_.free.pop_back();
    }
    step.evicted_users.push_back(user.id);
    host_.add(user);
  }

  void lose(User& user) {
    drop(user);
    ++stats_.losses;
  }

  void drop(User& user) {
    tier_of(user).take(user);
    device_.shorten(user.pages, 0);
    host_.shorten(user.host_pages, 0);
    users_.erase(user.id);
  }

  const PageTableConfig config_;
  mutable std::mutex mutex_;
  std::unordered_map<int64_t, User> users_;
  std::unordered_map<int64_t, Step> open_;
  Tier device_{config_.num_pages};
  Tier host_{config_.host_pages};
  int64_t next_step_ = 1;
  PageTableStats stats_;
};

}  // namespace hstu
