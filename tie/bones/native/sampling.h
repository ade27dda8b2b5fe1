// Drawing a token from a row of logits, as sampler.py explains it, in two passes over a vocabulary.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"

namespace tie {

constexpr int64_t kNeighbours = 256;  // tokens of a bucket in the race

// Filled in Python, field by field: see library.py.
struct Draw {
  const float* logits;
  float* weights;       // to fill: e^(scale (logit - largest)), 0 below `least`
  float* sums;          // to fill: of each bucket's weights
  const double* times;  // of exponential distribution: one for each bucket, then kNeighbours
  int64_t count;        // of tokens
  double top_p;         // 0 and 1 cut nothing
  float largest, scale, least;
  int32_t inside;  // the nucleus, or it has to be drawn again; this and the token are the outcome
  int64_t token;
};

// Which of them rings first.
static int64_t race(const float* rates, const double* times, int64_t count) {
  int64_t first = 0;
  double soonest = std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < count; ++i) {
    const double time = (times[i] + 1e-300) / rates[i];  // 0 / 0 would be no number
    if (time < soonest) soonest = time, first = i;
  }
  return first;
}

static void draw(Draw& d) {
  double total = 0;
  int64_t buckets = 0;
  for (int64_t i = 0, end; i < d.count; ++buckets) {
    end = std::min(i + kNeighbours, d.count);
    Floats sums{};
    for (; i + kWidth <= end; i += kWidth) {
      const Floats weight = exponential((load(d.logits + i) - d.largest) * d.scale);
      const Floats kept = weight >= d.least ? weight : Floats{};
      write(d.weights + i, kept);
      sums += kept;
    }
    float rest = 0;
    for (; i < end; ++i) {
      const float weight = std::exp((d.logits[i] - d.largest) * d.scale);
      rest += d.weights[i] = weight >= d.least ? weight : 0;
    }
    total += d.sums[buckets] = sum(sums) + rest;
  }
  const int64_t start = race(d.sums, d.times, buckets) * kNeighbours;
  d.token = start + race(d.weights + start, d.times + buckets, std::min(kNeighbours, d.count - start));
  d.inside = 1;
  if (!(d.top_p > 0 && d.top_p < 1)) return;
  const float own = d.weights[d.token];
  double likelier = 0;
  for (int64_t i = 0, end; i < d.count;) {
    end = std::min(i + kNeighbours, d.count);
    Floats sums{};
    for (; i + kWidth <= end; i += kWidth) {
      const Floats weight = load(d.weights + i);
      sums += weight > own ? weight : Floats{};
    }
    float rest = 0;
    for (; i < end; ++i) rest += d.weights[i] > own ? d.weights[i] : 0;
    likelier += sum(sums) + rest;
  }
  d.inside = likelier < d.top_p * total;
}

}  // namespace tie
