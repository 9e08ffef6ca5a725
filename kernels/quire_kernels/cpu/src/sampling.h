// One token per row of logits, without a sort of the vocabulary.
//
// A score is (logit - the largest) / temperature, at most 0. Weights are exp(score), summed as integers of 2^-40: no sum
// depends on its order, so a token depends on its row alone, and is the same on every instruction set. The thresholds of
// top-k and top-p are scores that occur. The least one whose scores from it up weigh enough is looked for among the
// largest scores of pieces of the row, which bound it from below if they weigh enough themselves, then among ever fewer
// scores between two of a sample (Floyd and Rivest, "Expected time bounds for selection", CACM 1975). The draw is the
// inverse of the cumulative distribution at a number of Philox4x32-10, as in reference/sampling.py.
#pragma once

#include <algorithm>
#include <functional>
#include <utility>

#include "gemm.h"
#include "simd.h"

namespace quire {

// See SamplingTensors in quire_kernels/sampling.py.
struct Requests {
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const int64_t* seeds;
  const int64_t* positions;
};

// See LogitEdits there.
struct Edits {
  const int32_t* starts;
  const float* factors;
  const int32_t* penalty_ids;
  const float* output_counts;
  const int32_t* bias_ids;
  const float* biases;
  const int32_t* ban_ids;
  const int64_t* newest;
  float* saved;  // [number of bans]: logits before the bans
};

namespace sampling {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float min_temperature = 1e-6f;
constexpr float bottom = -29;  // lower scores weigh nothing: exp(-29) is below 2^-41
constexpr int64_t piece = 256;  // logits whose largest is kept
constexpr int most_lanes = 16;

// The last bit of its sum with a weight is 2^-40.
constexpr double rounder = 1.5 * 4096;
inline uint64_t rounder_bits() {
  uint64_t bits;
  std::memcpy(&bits, &rounder, 8);
  return bits;
}

// Weights in [0, 1] as integers of 2^-40.
inline void to_units(vec weights, uint64_t* units) {
  for (int h = 0; h < 2; ++h) store(units + h * width / 2, bits_of_sum(half_of(weights, h), rounder));
  for (int i = 0; i < width; ++i) units[i] -= rounder_bits();
}

class Sum {
 public:
  void add(vec weights) {
    low_ = quire::add(low_, bits_of_sum(half_of(weights, 0), rounder));
    high_ = quire::add(high_, bits_of_sum(half_of(weights, 1), rounder));
    count_ += width;
  }

  uint64_t total() const {
    uint64_t lanes[width / 2], sum = 0;
    store(lanes, quire::add(low_, high_));
    for (uint64_t lane : lanes) sum += lane;
    return sum - count_ * rounder_bits();
  }

 private:
  integers low_ = no_integers(), high_ = no_integers();
  uint64_t count_ = 0;
};

constexpr uint64_t unit = uint64_t{1} << 40;  // of weight 1

struct One {
  vec operator()(vec) const { return splat(1); }
};

struct Probability {
  vec operator()(vec scores) const { return exp(scores); }
};

// Scores in memory. Up to a multiple of most_lanes -inf lies behind them.
struct List {
  const float* scores;
  int64_t size;

  float at(int64_t i) const { return scores[i]; }

  // Calls f(scores) at least for all vectors that hold a score of `from` or more.
  template <class F>
  void each(float, F f) const {
    for (int64_t i = 0; i < size; i += width) f(load(scores + i));
  }
};

struct LogitRow {
  const float* logits;
  int64_t size;
  float peak, temperature;
  const float* best;  // of each piece, the largest score

  int64_t num_pieces() const { return (size + piece - 1) / piece; }

  float at(int64_t i) const { return (logits[i] - peak) / temperature; }

  vec scores(int64_t i) const {
    const vec differences = sub(load_row(logits, size, i), splat(peak));
    return temperature == 1 ? differences : div(differences, splat(temperature));
  }

  template <class F>
  void each_of(int64_t number, F f) const {
    for (int64_t i = number * piece, end = std::min(size, i + piece); i < end; i += width) f(scores(i));
  }

  template <class F>
  void each(float from, F f) const {
    for (int64_t number = 0; number < num_pieces(); ++number)
      if (best[number] >= from) each_of(number, f);
  }

  // Logits from i on, and -inf behind the last.
  static vec load_row(const float* logits, int64_t size, int64_t i) {
    if (i + width <= size) return load(logits + i);
    float rest[width];
    for (int lane = 0; lane < width; ++lane) rest[lane] = i + lane < size ? logits[i + lane] : -infinity;
    return load(rest);
  }
};

// Memory of a thread, for rows of one size; what no row needs is never touched.
struct Room {
  float* best;      // of each piece
  uint64_t* units;  // of each piece
  float* lists[2];  // for scores
};

inline Room room_for(int64_t size) {
  struct Best;
  struct Units;
  struct First;
  struct Second;
  const int64_t num_pieces = (size + piece - 1) / piece, list_size = size + 2 * most_lanes;
  return {scratch<Best, float>(num_pieces + most_lanes), scratch<Units, uint64_t>(num_pieces),
          {scratch<First, float>(list_size), scratch<Second, float>(list_size)}};
}

// Copies the scores of [low, high] to `to`; returns what those above weigh.
template <class Source, class Weigh>
uint64_t split(const Source& source, float low, float high, Weigh weigh, float* to, int64_t& count) {
  Sum above;
  count = 0;
  source.each(low, [&](vec scores) {
    const uint32_t are_above = lanes_above(scores, splat(high));
    const uint32_t chosen = ~(are_above | lanes_above(splat(low), scores)) & ((1u << width) - 1);
    if (are_above) above.add(where_bits(are_above, weigh(scores), zero()));
    if (!chosen) return;
    store_chosen(to + count, chosen, scores);
    count += __builtin_popcount(chosen);
  });
  std::fill_n(to + count, most_lanes, -infinity);
  return above.total();
}

// What the scores from `least` up weigh.
template <class Source, class Weigh>
uint64_t weight_of(const Source& source, float least, Weigh weigh) {
  Sum sum;
  source.each(least, [&](vec scores) {
    sum.add(where_bits(~lanes_above(splat(least), scores), weigh(scores), zero()));
  });
  return sum.total();
}

// Calls f(i, units) for the weights of scores in memory one by one, until it is true of one: returns that one's i, or
// the last one's.
template <class Weigh, class F>
int64_t find(const float* scores, int64_t count, Weigh weigh, F f) {
  uint64_t units[most_lanes];
  for (int64_t i = 0; i < count; i += width) {
    to_units(weigh(load(scores + i)), units);
    for (int64_t lane = 0; lane < std::min<int64_t>(width, count - i); ++lane)
      if (f(i + lane, units[lane])) return i + lane;
  }
  return count - 1;
}

// Two scores of a sample between which the threshold probably lies; one, with `is_single`. What weighs less is estimated
// from the lowest scores up, as a few of the largest may weigh more than all of a sample.
template <class Source, class Weigh>
void bracket(const Source& source, uint64_t target, uint64_t total, bool is_single, Weigh weigh, float& low, float& high) {
  constexpr int most = 512;
  float sample[most + most_lanes];
  const int count = int(std::min<int64_t>(most, source.size / 8));
  for (int i = 0; i < count; ++i) sample[i] = source.at(source.size * i / count);
  std::fill_n(sample + count, most_lanes, -infinity);
  std::sort(sample, sample + count);
  double left = double(total - target) * count / double(source.size);
  const float least = low;
  const int place = int(find(sample, count, weigh, [&](int64_t i, uint64_t units) {
    if (sample[i] >= least) left -= double(units);
    return left < 0;
  }));
  const int margin = is_single ? 0 : int(1.5 * std::sqrt(count));
  low = std::max(least, sample[std::max(place - margin, 0)]);
  high = std::max(least, sample[std::min(place + margin, count - 1)]);
}

// The largest score such that those from it up weigh `target` or more.
//
// `total`, no less than `target` >= 1, is what those from `least` up weigh. With `are_few` all of them are candidates, else
// those between two of a sample. Candidates go to room.lists[turn].
template <class Source, class Weigh>
float threshold(const Source& source, uint64_t target, uint64_t total, float least, bool are_few, Weigh weigh,
                const Room& room, int turn = 0, bool is_single = false) {
  constexpr int64_t few = 256;
  float* const to = room.lists[turn];
  float low = least, high = infinity;
  if (!are_few && source.size > few) bracket(source, target, total, is_single, weigh, low, high);
  int64_t count;
  uint64_t inside, above;
  auto take = [&] {
    above = split(source, low, high, weigh, to, count);
    inside = weight_of(List{to, count}, least, weigh);
  };
  take();
  if (target <= above) {
    low = std::nextafter(high, infinity);
    high = infinity;
    take();
  } else if (target > above + inside) {
    high = std::nextafter(low, -infinity);
    low = least;
    take();
  }
  if (low == high) return low;
  target -= above;
  if (count <= few) {
    std::sort(to, to + count, std::greater<float>());
    return to[find(to, count, weigh, [&](int64_t, uint64_t units) {
      if (units >= target) return true;
      target -= units;
      return false;
    })];
  }
  // One score alone always leaves less; two may not, where many are equal.
  return threshold(List{to, count}, target, inside, least, false, weigh, room, 1 - turn, count > source.size / 2);
}

// As above, of a row's scores; a total of 0 is not known. `least` itself if those from it up do not weigh enough.
template <class Weigh>
float threshold_of_row(const LogitRow& row, uint64_t target, uint64_t total, float least, Weigh weigh, const Room& room) {
  // The best of the pieces are scores as well: if they weigh enough, nothing below their own threshold is needed.
  const List best{row.best, row.num_pieces()};
  const uint64_t weight = weight_of(best, least, weigh);
  const bool are_few = weight >= target;
  if (are_few) {
    least = threshold(best, target, weight, least, false, weigh, room);
  } else {
    if (total == 0) total = weight_of(row, least, weigh);
    if (target >= total) return least;
  }
  return threshold(row, target, total, least, are_few, weigh, room);
}

// What the scores from `least` up weigh, in all and in each piece.
inline uint64_t weigh_pieces(const LogitRow& row, float least, uint64_t* units) {
  uint64_t total = 0;
  for (int64_t number = 0; number < row.num_pieces(); ++number) {
    Sum sum;
    if (row.best[number] >= least)
      row.each_of(number, [&](vec scores) {
        sum.add(where_bits(~lanes_above(splat(least), scores), exp(scores), zero()));
      });
    total += units[number] = sum.total();
  }
  return total;
}

// The largest logit, also of each piece; NaN if one is.
inline float find_best(const float* logits, int64_t size, float* best) {
  vec nans = zero();
  float peak = -infinity;
  for (int64_t i = 0; i < size; i += piece) {
    const int64_t end = std::min(size, i + piece);
    vec most = splat(-infinity);
    for (int64_t j = i; j < end; j += width) {
      const vec next = LogitRow::load_row(logits, size, j);
      most = max(next, most);  // passes over NaN
      nans = nan_of(next, nans);
    }
    peak = std::max(peak, best[i / piece] = largest(most));
  }
  return sum(nans) == 0 ? peak : std::numeric_limits<float>::quiet_NaN();
}

// A number in [0, 1) by Philox4x32-10 (Salmon et al., SC 2011).
inline double uniform(uint64_t seed, uint64_t position) {
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  uint32_t c0 = uint32_t(position), c1 = uint32_t(position >> 32), c2 = 0, c3 = 0;
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const uint64_t even = c0 * uint64_t{0xD2511F53}, odd = c2 * uint64_t{0xCD9E8D57};
    c0 = uint32_t(odd >> 32) ^ c1 ^ k0;
    c1 = uint32_t(odd);
    c2 = uint32_t(even >> 32) ^ c3 ^ k1;
    c3 = uint32_t(even);
  }
  return double(uint64_t(c0) << 21 | c1 >> 11) * 0x1p-53;
}

// A token by the number: the first whose cumulative weight is above it.
inline int64_t draw(const LogitRow& row, float least, const uint64_t* units, uint64_t total, double number) {
  uint64_t target = std::min(uint64_t(number * double(total)), total - 1);
  int64_t chosen = 0;
  for (; units[chosen] <= target; ++chosen) target -= units[chosen];
  float scores[piece];
  int64_t count = 0;
  row.each_of(chosen, [&](vec next) {
    store(scores + count, where_bits(~lanes_above(splat(least), next), next, splat(-infinity)));
    count += width;
  });
  return chosen * piece + find(scores, count, Probability{}, [&](int64_t, uint64_t weight) {
    if (weight > target) return true;
    target -= weight;
    return false;
  });
}

// Products are rounded before anything is added: the edited logits are the reference's, bit for bit.
inline float product(float a, float b) { return float(double(a) * b); }

inline float penalised(float x, float count, float repetition, float presence, float frequency) {
  if (std::isinf(x)) return x;
  float y = x < 0 ? product(x, repetition) : x / repetition;
  y = y - product(frequency, count) - (count > 0 ? presence : 0);
  return y > std::numeric_limits<float>::max() ? std::numeric_limits<float>::max() : y;
}

// Edits a row of `num_rows`; its bans are the entries [first, second) of the list.
inline std::pair<int, int> edit(float* x, int row, int num_rows, const Edits& edits) {
  auto range = [&](int list) {
    const int32_t* starts = edits.starts + list * (num_rows + 1) + row;
    return std::pair<int, int>(starts[0], starts[1]);
  };
  const auto penalties = range(0), biases = range(1), bans = range(2);
  const int64_t newest = edits.newest ? edits.newest[row] : -1;
  const float *repetition = edits.factors + row, *presence = repetition + num_rows, *frequency = presence + num_rows;
  bool is_listed = false;
  for (int e = penalties.first; e < penalties.second; ++e) {
    const bool is_newest = edits.penalty_ids[e] == newest;
    is_listed |= is_newest;
    float& logit = x[edits.penalty_ids[e]];
    logit = penalised(logit, edits.output_counts[e] + float(is_newest), *repetition, *presence, *frequency);
  }
  if (newest >= 0 && !is_listed) x[newest] = penalised(x[newest], 1, *repetition, *presence, *frequency);
  for (int e = biases.first; e < biases.second; ++e) x[edits.bias_ids[e]] += edits.biases[e];
  // All are saved before any is lost: a token may be banned twice.
  for (int e = bans.first; e < bans.second; ++e) edits.saved[e] = x[edits.ban_ids[e]];
  for (int e = bans.first; e < bans.second; ++e) x[edits.ban_ids[e]] = -infinity;
  return bans;
}

}  // namespace sampling

// A token of row `number` of `num_rows`, -1: the row holds NaN, or its largest logit is not finite. Edits x.
inline int64_t sample(float* x, int64_t size, int number, int num_rows, const Requests& asked, const Edits* edits) {
  using namespace sampling;
  const Room room = room_for(size);
  float* const best = room.best;
  const auto bans = edits ? edit(x, number, num_rows, *edits) : std::pair<int, int>(0, 0);
  float peak = find_best(x, size, best);
  if (bans.first < bans.second && peak == -infinity) {
    for (int e = bans.first; e < bans.second; ++e) x[edits->ban_ids[e]] = edits->saved[e];
    peak = find_best(x, size, best);
  }
  if (!std::isfinite(peak)) return -1;
  if (!(asked.temperature[number] > 0)) {
    const int64_t first = (std::find(best, best + size / piece, peak) - best) * piece;
    return std::find(x + first, x + size, peak) - x;
  }

  const LogitRow row{x, size, peak, std::max(asked.temperature[number], min_temperature), best};
  for (int64_t i = 0; i < row.num_pieces(); ++i) best[i] = (best[i] - peak) / row.temperature;
  std::fill_n(best + row.num_pieces(), most_lanes, -infinity);
  float least = bottom;
  const int64_t top_k = asked.top_k[number];
  if (top_k > 0 && top_k < size) least = threshold_of_row(row, top_k * unit, 0, least, One{}, room);
  const double top_p = asked.top_p[number];
  if (top_p < 1) {
    const uint64_t total = weigh_pieces(row, least, room.units);
    const uint64_t target = std::max(uint64_t(std::ceil(top_p * double(total))), uint64_t{1});
    least = threshold_of_row(row, target, total, least, Probability{}, room);
  }
  if (asked.min_p[number] > 0) least = std::max(least, float(std::log(double(asked.min_p[number]))));
  const uint64_t total = weigh_pieces(row, least, room.units);
  return draw(row, least, room.units, total, uniform(uint64_t(asked.seeds[number]), uint64_t(asked.positions[number])));
}

}  // namespace quire
