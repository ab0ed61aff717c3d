#include "page_table.h"

#include <algorithm>
#include <limits>
#include <string>

#include "../common/math.h"

namespace hstu {
namespace {

constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();  // slots are int32
constexpr const char* kNotInStep = "users in no open step";

template <class T>
[[noreturn]] void fail(const char* name, const std::string& expected, T got) {
  throw std::invalid_argument(std::string(name) + ": expected " + expected + ", got " +
                              std::to_string(got));
}

template <class Container>
int64_t size_of(const Container& container) {
  return static_cast<int64_t>(container.size());
}

const PageTableConfig& checked(const PageTableConfig& config) {
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

}  // namespace

void PageMoves::add(int64_t device_page, int64_t host_page) {
  device.push_back(device_page);
  host.push_back(host_page);
}

// ------------------------------------------------------------------------------------------- tiers

PageTable::Tier::Tier(int64_t num_pages) {
  free.reserve(num_pages);
  for (int64_t page = num_pages; page-- > 0;) free.push_back(static_cast<int32_t>(page));
}

void PageTable::Tier::extend(std::vector<int32_t>& pages, int64_t count) {
  for (; count > 0; --count) {
    pages.push_back(free.back());
    free.pop_back();
  }
}

void PageTable::Tier::shorten(std::vector<int32_t>& pages, int64_t count) {
  for (; size_of(pages) > count; pages.pop_back()) free.push_back(pages.back());
}

void PageTable::Tier::add(User& user) {
  user.older = newest;
  user.newer = nullptr;
  (newest ? newest->newer : oldest) = &user;
  newest = &user;
  ++users;
}

void PageTable::Tier::take(User& user) {
  if (!user.length) return;
  (user.older ? user.older->newer : oldest) = user.newer;
  (user.newer ? user.newer->older : newest) = user.older;
  --users;
}

// ----------------------------------------------------------------------------------- opening steps

PageTable::PageTable(const PageTableConfig& config) : config_(checked(config)) {}

int64_t PageTable::pages_of(int64_t tokens) const { return ceil_div(tokens, config_.page_size); }

PageTable::Step& PageTable::find_step(int64_t number) {
  const auto found = open_.find(number);
  if (found == open_.end()) fail("step", "an open step", number);
  return found->second;
}

const PageTable::Step& PageTable::find_step(int64_t number) const {
  return const_cast<PageTable*>(this)->find_step(number);
}

StepSize PageTable::begin(const int64_t* users, const int64_t* new_tokens,
                          const int64_t* cached_lens, const int64_t* rewritten, int64_t batch) {
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

// Makes the users members of the step, and checks that there is room for their new tokens.
void PageTable::enrol(Step& step, int64_t number, const int64_t* users, const int64_t* new_tokens,
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

// Chooses users of the device tier to evict, least recently used first, until their pages make
// enough room; enrol() has checked that they can. The host takes the most recently used of these
// users that fit.
std::vector<PageTable::Victim> PageTable::choose_victims(Step& step) const {
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

// Allocates the page lists, so that nothing throws once pages move.
void PageTable::reserve(Step& step, const std::vector<Victim>& victims) {
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

void PageTable::evict(const std::vector<Victim>& victims, Step& step) {
  while (size_of(host_.free) < step.evicted_pages) lose(*host_.oldest);
  for (const Victim& victim : victims) {
    victim.to_host ? move_to_host(*victim.user, step) : lose(*victim.user);
  }
  stats_.evictions += size_of(victims);
}

void PageTable::move_to_host(User& user, Step& step) {
  device_.take(user);
  user.host_pages.swap(user.pages);  // the list has the same length on the host
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

void PageTable::lose(User& user) {
  drop(user);
  ++stats_.losses;
}

void PageTable::drop(User& user) {
  tier_of(user).take(user);
  device_.shorten(user.pages, 0);
  host_.shorten(user.host_pages, 0);
  users_.erase(user.id);
}

// ----------------------------------------------------------------------------------- closing steps

void PageTable::release(int64_t number) {
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

void PageTable::roll_back(int64_t number) {
  const Lock lock(mutex_);
  undo(number, find_step(number));
}

void PageTable::cancel(int64_t number) {
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

void PageTable::close(int64_t number, Step& step) {
  for (const Member& member : step.members) {
    member.user->step = 0;
    if (!member.user->length) users_.erase(member.user->id);
  }
  open_.erase(number);
}

void PageTable::finish(int64_t number, Step& step) {
  for (const Member& member : step.members) {
    User& user = *member.user;
    device_.pinned_pages -= size_of(user.pages);
    host_.pinned_pages -= size_of(user.host_pages);
    if (user.length) tier_of(user).add(user);
  }
  close(number, step);
}

void PageTable::undo(int64_t number, Step& step) {
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

// ----------------------------------------------------------------------------------------- queries

std::pair<PageMoves, PageMoves> PageTable::moves(int64_t number) const {
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

void PageTable::write_tables(int64_t number, const StepTables& tables) const {
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

void PageTable::lookup(const int64_t* users, int64_t batch, int32_t* lengths) const {
  const Lock lock(mutex_);
  for (int64_t b = 0; b < batch; ++b) {
    const auto found = users_.find(users[b]);
    lengths[b] = found == users_.end() ? 0 : found->second.length;
  }
}

std::vector<int32_t> PageTable::pages(int64_t user) const {
  const Lock lock(mutex_);
  const auto found = users_.find(user);
  return found == users_.end() ? std::vector<int32_t>() : found->second.pages;
}

std::vector<int32_t> PageTable::host_pages(int64_t user) const {
  const Lock lock(mutex_);
  const auto found = users_.find(user);
  return found == users_.end() ? std::vector<int32_t>() : found->second.host_pages;
}

void PageTable::free(const int64_t* users, int64_t batch) {
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

void PageTable::clear() {
  const Lock lock(mutex_);
  if (!open_.empty()) fail("clear", "no open step", open_.size());
  while (device_.oldest) drop(*device_.oldest);
  while (host_.oldest) drop(*host_.oldest);
}

PageTableStats PageTable::stats() const {
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

}  // namespace hstu
