// Runs a forward or a backward call on the CPU.
#pragma once

#include <cstdint>
#include <functional>

#include "../params.h"

namespace hstu::cpu {

// Calls function(0) to function(count - 1), in parallel if it can.
using ParallelFor = std::function<void(int count, const std::function<void(int)>& function)>;

struct Parallel {
  int threads = 1;
  ParallelFor run;
};

// These write every row of the outputs: rows that belong to no sequence become zeros.
void run_forward(const ForwardParams& params, const Parallel& parallel);
void run_backward(const BackwardParams& params, const Parallel& parallel);

}  // namespace hstu::cpu
