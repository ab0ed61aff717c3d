// The page table of a KV cache: which pages hold whose tokens, in the memory of the device and, if
// there is such a tier, of the host. The pages themselves are the caller's tensors: nothing here
// reads or writes them, and nothing waits for a GPU. In C++ it serves programs without Python
// (examples/cpp/score.cpp), and a step of 64 users with 32 new tokens each takes 3 us.
#pragma once

#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

namespace hstu {

// Thrown if a batch needs more pages than are free or can be freed by eviction.
struct OutOfPages : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct PageTableConfig {
  int64_t num_pages = 0;
  int64_t page_size = 0;   // [tokens]
  bool evict = true;       // whether users in no open step may lose their pages to others
  int64_t host_pages = 0;  // pages of the tier in host memory, which takes users who are evicted
};

struct PageTableStats {
  int64_t free_pages = 0;
  int64_t used_pages = 0;
  int64_t pinned_pages = 0;  // used pages of users in open steps
  int64_t users = 0;
  int64_t hits = 0;       // users that a released step found with tokens
  int64_t misses = 0;     // users that a released step found without tokens
  int64_t evictions = 0;  // users who lost their device pages
  int64_t free_host_pages = 0;
  int64_t used_host_pages = 0;
  int64_t host_users = 0;       // users whose tokens are only on the host, and in no open step
  int64_t returning_users = 0;  // users whom open steps bring back from the host
  int64_t host_hits = 0;        // hits that came back from the host
  int64_t losses = 0;  // users who lost their tokens: evicted, and with no room on the host
  int64_t pages_to_host = 0;
  int64_t pages_from_host = 0;
};

struct StepSize {
  int64_t step = 0;    // the number of the step
  int64_t pages = 0;   // pages of its users, new ones included
  int64_t tokens = 0;  // tokens to write
};

// The tables that write_tables() writes for a step of B users, P pages and N tokens to write. The
// tokens are in the order of the users. The rewritten tokens of a user come before its new tokens.
struct StepTables {
  int32_t* page_offsets;    // [B + 1]
  int32_t* page_ids;        // [P]
  int32_t* last_page_lens;  // [B]
  int32_t* cached_lens;     // [B] tokens from before the step that stay as they are
  int32_t* slots;           // [N] page * page_size + offset of each token to write
};

// Pages to copy from one tier to the other: pair n is device[n] and host[n].
struct PageMoves {
  std::vector<int64_t> device;
  std::vector<int64_t> host;

  void add(int64_t device_page, int64_t host_page);
};

// A user is in at most one open step. A user without tokens is equivalent to an unknown user, and
// is kept only while its step is open. Every method may be called from any thread and is atomic: it
// succeeds or changes nothing.
//
// With a tier on the host, a user in no open step is in one tier or the other. A step brings back
// its users who are on the host. They hold pages in both tiers until the step is closed, so that
// rolling it back needs no copy. The copies that a step asks for (`moves`) must be made, or
// enqueued, before the next step begins; else the step must be cancelled.
class PageTable {
 public:
  // Throws std::invalid_argument for counts that are out of range.
  explicit PageTable(const PageTableConfig& config);

  // Opens a step: finds room for the new tokens of all users, evicting others if need be, and pins
  // the users until the step is closed. `cached_lens` is null, or what the caller believes to be
  // cached of each user; `rewritten` is null, or how many of a user's last cached tokens are
  // written again. Throws OutOfPages, or std::invalid_argument for a bad user or count.
  StepSize begin(const int64_t* users, const int64_t* new_tokens, const int64_t* cached_lens,
                 const int64_t* rewritten, int64_t batch);

  // Returns the pages of users that an open step evicted, to copy to the host, and the pages of
  // users that it brings back, to copy to the device. A device page may be in both lists: the copy
  // to the host must read it before the copy to the device writes it. A host page is in one list at
  // most.
  std::pair<PageMoves, PageMoves> moves(int64_t number) const;

  // Fills in the tables of an open step.
  void write_tables(int64_t number, const StepTables& tables) const;

  // Closes a step and keeps its tokens. Its users are now the most recently used ones, the last of
  // the batch most recently; none is on the host.
  void release(int64_t number);

  // Closes a step and drops its tokens: its users have their earlier lengths and pages again, in
  // their earlier tiers, as the most recently used ones there. Users evicted for the step stay
  // evicted.
  void roll_back(int64_t number);

  // Rolls back a step whose copies could not be made: users whom it evicted are forgotten.
  void cancel(int64_t number);

  // Writes the tokens of each user, new ones of open steps included; 0 for an unknown user.
  void lookup(const int64_t* users, int64_t batch, int32_t* lengths) const;

  // A user's pages on the device, and on the host, in the order of its tokens.
  std::vector<int32_t> pages(int64_t user) const;
  std::vector<int32_t> host_pages(int64_t user) const;

  // Forgets users, known or not, who are in no open step.
  void free(const int64_t* users, int64_t batch);

  // Forgets all users; no step may be open.
  void clear();

  PageTableStats stats() const;

 private:
  using Lock = std::lock_guard<std::mutex>;

  // A user in no open step is in its tier's list.
  struct User {
    int64_t id = 0;
    int64_t step = 0;    // the open step that pins it, or 0
    int32_t length = 0;  // [tokens]
    std::vector<int32_t> pages;
    std::vector<int32_t> host_pages;
    User* older = nullptr;
    User* newer = nullptr;

    bool on_host() const { return pages.empty() && !host_pages.empty(); }
  };

  // The pages of one memory, and a list of the users in no open step whose tokens are there, from
  // the least to the most recently used.
  struct Tier {
    std::vector<int32_t> free;  // a stack, whose capacity is all pages
    int64_t pinned_pages = 0;   // pages of users in open steps
    int64_t users = 0;          // users in the list
    User* oldest = nullptr;
    User* newest = nullptr;

    explicit Tier(int64_t num_pages);

    // Appends `count` free pages to a user's pages, whose capacity suffices.
    void extend(std::vector<int32_t>& pages, int64_t count);
    // Frees a user's pages after the first `count`.
    void shorten(std::vector<int32_t>& pages, int64_t count);
    // Add a user to the list as the newest, and take a user out of the list. A user without tokens
    // is not in the list.
    void add(User& user);
    void take(User& user);
  };

  struct Member {
    User* user;  // does not move: users_ allocates each node by itself
    int32_t new_tokens;
    int32_t rewritten;

    // These two are valid once begin() has lengthened the user.
    int32_t cached() const { return user->length - new_tokens; }
    int32_t kept() const { return cached() - rewritten; }
  };

  struct Step {
    std::vector<Member> members;
    int64_t new_pages = 0;
    int64_t returning_pages = 0;  // pages of members that it brings back
    int64_t evicted_pages = 0;    // pages of others whom it moves to the host
    int64_t pages = 0;
    int64_t tokens = 0;
    PageMoves evicted;
    std::vector<int64_t> evicted_users;
  };

  struct Victim {
    User* user;
    bool to_host;
  };

  int64_t pages_of(int64_t tokens) const;
  Tier& tier_of(const User& user) { return user.on_host() ? host_ : device_; }
  Step& find_step(int64_t number);
  const Step& find_step(int64_t number) const;

  // The parts of begin(): the first three may throw, and close() undoes what they have done.
  void enrol(Step& step, int64_t number, const int64_t* users, const int64_t* new_tokens,
             const int64_t* cached_lens, const int64_t* rewritten, int64_t batch);
  std::vector<Victim> choose_victims(Step& step) const;
  void reserve(Step& step, const std::vector<Victim>& victims);
  void evict(const std::vector<Victim>& victims, Step& step);

  // Unpins a step's users, forgets those without tokens, and forgets the step.
  void close(int64_t number, Step& step);
  // Closes a step whose users have their final pages, and adds the users to the lists of the tiers.
  void finish(int64_t number, Step& step);
  // Takes the new tokens from a step's users, and closes it.
  void undo(int64_t number, Step& step);

  void move_to_host(User& user, Step& step);
  void lose(User& user);  // drops a user who is evicted without room on the host
  void drop(User& user);

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
