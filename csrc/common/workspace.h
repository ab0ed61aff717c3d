// Hands out aligned pieces of a call's workspace; without memory it only counts them.
#pragma once

#include "work_list.h"

namespace hstu {

class Workspace {
 public:
  explicit Workspace(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <typename T>
  T* take(int64_t count) {
    T* piece = memory_ ? reinterpret_cast<T*>(memory_ + used_) : nullptr;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return piece;
  }

  WorkList take_list(int64_t total, int batch, int tile_size) {
    WorkList list;
    list.capacity = WorkList::max_tiles(total, batch, tile_size);
    list.next = take<int>(2);
    list.count = list.next + 1;
    list.tiles = take<WorkTile>(list.capacity);
    return list;
  }

  int64_t used() const { return used_; }

 private:
  static constexpr int64_t kAlignment = 256;

  char* memory_;
  int64_t used_ = 0;
};

}  // namespace hstu
