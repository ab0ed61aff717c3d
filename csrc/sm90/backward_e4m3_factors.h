// The scales of the backward in e4m3.
//
// With one descale for each of q, k, v and dO of a sequence and head, and the codes q', k', v' and
// dO' in place of the values:
//
//   S  = q_descale * k_descale * q' k'^T
//   P' = weight * silu(alpha * S)                              in e4m3
//   D' = 2^-dscore_shift * silu'(alpha * S) * ((dO' / r) v'^T) in e4m3
//
//   dV = dout_descale / weight * P'^T dO'
//   dK = q_descale * dscore * D'^T (r q')
//   dQ = k_descale * dscore * r * (D' k')   dscore = dout_descale * v_descale * 2^dscore_shift
//
// Each row of dO has a power of two r, QuantizeParams::q_row_scale, with which the products of rows
// with small gradients have codes as good as those of others. dO' / r and r q' are quantized from
// dO and q, beside dO' and q'.
//
// `weight` is the largest power of two with which P' cannot overflow, since |silu(x)| <= |x|, and a
// product of codes is at most D * 448^2. Likewise, 2^-dscore_shift is the largest power of two with
// which D' cannot overflow, since |silu'| <= 1.1.
#pragma once

#include "../scheduler/work_list.h"
#include "e4m3_keys.h"

namespace hstu::sm90 {

// The descales that quantize_qkv() writes with QuantMode::kHead: q and dout are [H, total_q], one
// for each row; k and v are [H, blocks], one for each block of 128 keys.
struct E4m3Descales {
  const float* q;
  const float* k;
  const float* v;
  const float* dout;
  const float* dout_row_scale;  // [H, total_q]
  int64_t total_q;
  int64_t blocks;
};

struct E4m3Factors {
  float half_score;  // alpha / 2 * q_descale * k_descale
  float weight;
  float dq, dk, dv;  // factors of the products, without alpha and the scale of P
};

// Returns the factors of a head of a sequence, and zeros if it has no rows or no keys.
HSTU_DEVICE E4m3Factors find_factors(const E4m3Descales& descales, const Sequence& sequence,
                                     int sequence_index, int head, int head_dim, float alpha) {
  if (sequence.q_len == 0 || sequence.k_len == 0) return {};
  constexpr float kLargest = 448;
  const int64_t row = head * descales.total_q + sequence.q_begin;
  const int64_t block =
      head * descales.blocks + first_tile(sequence.k_begin, sequence_index, Fp8Params::kBlock);
  const float q = descales.q[row], dout = descales.dout[row];
  const float k = descales.k[block], v = descales.v[block];
  E4m3Factors factors;
  factors.half_score = 0.5f * alpha * q * k;
  factors.weight = weight_scale(2 * fabsf(factors.half_score) * head_dim * (kLargest * kLargest));
  const float dscore = dout * v * (512.0f * head_dim);
  factors.dq = k * dscore;
  factors.dk = q * dscore;
  factors.dv = dout / factors.weight;
  return factors;
}

}  // namespace hstu::sm90
