// Attention of one kv head's query heads to some of its positions, over any kind of lanes. Included
// by cpu.cc inside a namespace, after a file of lanes and the exponential.
//
// Every sum runs in one order: a score over 16 lanes of the head and then across them, a sum of
// weights over 16 lanes of the positions, a weighted sum of values position by position.

// Elements of a head from the i-th on, as kTile lanes. A tile of one may be the last of a head that
// is not whole: zeros follow.
template <int kTile, typename T>
ZEN_LANES void load_tile(const T* head, int64_t i, int64_t size, Lanes* tile) {
  if (kTile == 1 && i + kLanes > size) {
    tile[0] = load_part(head + i, size - i);
    return;
  }
#pragma GCC unroll 4
  for (int t = 0; t < kTile; t++) tile[t] = load(head + i + t * kLanes);
}

// Asks for a tile that will be needed soon, into the second level of caches: asked for into the
// first, it would take the place of what is waited for, and be twice as slow.
template <int kTile, typename T>
ZEN_LANES void want_tile(const T* tile) {
  const char* bytes = reinterpret_cast<const char*>(tile);
#pragma GCC unroll 4
  for (int at = 0; at < int(kTile * kLanes * sizeof(T)); at += 64)
    __builtin_prefetch(bytes + at, 0, 1);
}

// Products of kGroup queries with the keys of a block, over kTile lanes of the head from the i-th
// element on, added to what `sums` has from before it.
template <bool kFirst, int kGroup, int kTile, typename T>
ZEN_LANES void multiply(const Heads& h, const float* q, const Block<T>& k, int64_t i,
                        Lanes sums[kGroup][kLanes]) {
  Lanes query[kGroup][kTile], key[kTile];
#pragma GCC unroll 4
  for (int g = 0; g < kGroup; g++) load_tile<kTile>(q + g * h.padded, i, h.padded, query[g]);
  for (int64_t j = k.skip; j < k.count; j++) {
    want_tile<kTile>(k.next + j * h.size + i);
    load_tile<kTile>(k.here + j * h.stride, i, h.size, key);
#pragma GCC unroll 4
    for (int g = 0; g < kGroup; g++) {
      Lanes sum = kFirst ? fill(0.0f) : sums[g][j];
#pragma GCC unroll 4
      for (int t = 0; t < kTile; t++) sum = fma(query[g][t], key[t], sum);
      sums[g][j] = sum;
    }
  }
}

// Scores of kGroup query heads with a block; -infinity for positions that it does not have or that
// are not seen.
template <int kGroup, typename T>
ZEN_TARGET void score(const Heads& h, const float* q, const Block<T>& k, float* scores) {
  Lanes sums[kGroup][kLanes];
  int64_t i = kLanes;
  if (h.size < 4 * kLanes) {
    multiply<true, kGroup, 1>(h, q, k, 0, sums);
  } else {
    multiply<true, kGroup, 4>(h, q, k, 0, sums);
    for (i = 4 * kLanes; i + 4 * kLanes <= h.size; i += 4 * kLanes)
      multiply<false, kGroup, 4>(h, q, k, i, sums);
  }
  for (; i < h.size; i += kLanes) multiply<false, kGroup, 1>(h, q, k, i, sums);
  for (int g = 0; g < kGroup; g++) {
    for (int64_t j = 0; j < k.skip; j++) sums[g][j] = fill(0.0f);
    for (int64_t j = k.count; j < kLanes; j++) sums[g][j] = fill(0.0f);
    store(scores + g * kChunk, mul(across16(sums[g]), fill(h.scale)));
    for (int64_t j = 0; j < k.skip; j++) scores[g * kChunk + j] = -INFINITY;
    for (int64_t j = k.count; j < kLanes; j++) scores[g * kChunk + j] = -INFINITY;
  }
}

// Scores of one query head turned into weights e^(score - largest).
ZEN_TARGET Softmax weigh(int64_t count, float* scores) {
  Lanes most = fill(kLowest), sum = fill(0.0f);
  for (int64_t s = 0; s < count; s += kLanes) most = larger(most, load(scores + s));
  float lanes[kLanes];
  store(lanes, most);
  const float largest = *std::max_element(lanes, lanes + kLanes);
  for (int64_t s = 0; s < count; s += kLanes) {
    const Lanes weight = exponential(sub(load(scores + s), fill(largest)));
    store(scores + s, weight);
    sum = add(sum, weight);
  }
  store(lanes, sum);
  return {largest, across(lanes)};
}

// A block's values weighted for kGroup query heads, over kTile lanes of the head from the i-th
// element on, added to y.
template <int kGroup, int kTile, typename T>
ZEN_LANES void gather_tile(const Heads& h, const float* weights, const Block<T>& v, int64_t i,
                           float* y) {
  Lanes sums[kGroup][kTile], value[kTile];
#pragma GCC unroll 4
  for (int g = 0; g < kGroup; g++) load_tile<kTile>(y + g * h.padded, i, h.padded, sums[g]);
  for (int64_t j = v.skip; j < v.count; j++) {
    want_tile<kTile>(v.next + j * h.size + i);
    load_tile<kTile>(v.here + j * h.stride, i, h.size, value);
#pragma GCC unroll 4
    for (int g = 0; g < kGroup; g++) {
      const Lanes weight = fill(weights[g * kChunk + j]);
#pragma GCC unroll 4
      for (int t = 0; t < kTile; t++) sums[g][t] = fma(weight, value[t], sums[g][t]);
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < kGroup; g++)
    for (int t = 0; t < kTile; t++) store(y + g * h.padded + i + t * kLanes, sums[g][t]);
}

template <int kGroup, typename T>
ZEN_TARGET void gather(const Heads& h, const float* weights, const Block<T>& v, float* y) {
  int64_t i = 0;
  for (; i + 4 * kLanes <= h.size; i += 4 * kLanes) gather_tile<kGroup, 4>(h, weights, v, i, y);
  for (; i < h.size; i += kLanes) gather_tile<kGroup, 1>(h, weights, v, i, y);
}

// Calls `of` with a number of query heads, 1 to 4, and the first of them, for all of a kv head.
template <typename F>
void by_fours(int64_t group, const F& of) {
  int64_t g = 0;
  for (; g + 4 <= group; g += 4) of(std::integral_constant<int, 4>(), g);
  switch (group - g) {
    case 3: of(std::integral_constant<int, 3>(), g); break;
    case 2: of(std::integral_constant<int, 2>(), g); break;
    case 1: of(std::integral_constant<int, 1>(), g); break;
  }
}

// Some kv heads with a chunk of positions, of which those up to `skip` are not seen: q and y
// [heads, G, padded]; `blocks` are those of the chunk's keys at its first head, those of its values,
// and two that are read next; weights [heads, G, kChunk] is room to work in.
//
// All heads' blocks lie mixed, position by position. Each asks for a part of the block that comes
// two blocks later, in the order in which it lies, which the processor's own foresight follows best.
template <typename T>
void attend_chunk(const Heads& h, const float* q, const T* const* blocks, int64_t count, int64_t skip,
                  int64_t heads, float* weights, float* y, Softmax* softmax) {
  const int64_t in_chunk = (count + kLanes - 1) / kLanes;
  const auto block_of = [&](int64_t number, int64_t s, int64_t head) {
    const T* here = blocks[number] + head * h.size;
    const T* next = blocks[number + 2] + head * kLanes * h.size;
    return Block<T>{here, next, std::max<int64_t>(0, skip - s), std::min(kLanes, count - s)};
  };
  for (int64_t s = 0; s < count; s += kLanes)
    for (int64_t head = 0; head < heads; head++) {
      const Block<T> block = block_of(s / kLanes, s, head);
      by_fours(h.group, [&](auto some, int64_t g) {
        const int64_t n = head * h.group + g;
        score<some>(h, q + n * h.padded, block, weights + n * kChunk + s);
      });
    }
  for (int64_t n = 0; n < heads * h.group; n++) softmax[n] = weigh(count, weights + n * kChunk);
  std::fill(y, y + heads * h.group * h.padded, 0.0f);
  for (int64_t s = 0; s < count; s += kLanes)
    for (int64_t head = 0; head < heads; head++) {
      const Block<T> block = block_of(in_chunk + s / kLanes, s, head);
      by_fours(h.group, [&](auto some, int64_t g) {
        const int64_t n = head * h.group + g;
        gather<some>(h, weights + n * kChunk + s, block, y + n * h.padded);
      });
    }
}

// What the chunks of one query head found, `step` heads apart, put together in their order: y[H].
// The first chunk's sums are overwritten.
ZEN_TARGET void combine(const Heads& h, float* sums, const Softmax* softmax, int64_t chunks,
                        int64_t step, float* y) {
  float largest = kLowest;
  for (int64_t c = 0; c < chunks; c++) largest = std::max(largest, softmax[c * step].largest);
  Lanes total = fill(0.0f);
  for (int64_t c = 0; c < chunks; c++) {
    const Lanes weight = exponential(fill(softmax[c * step].largest - largest));
    const float* other = sums + c * step * h.padded;
    for (int64_t i = 0; i < h.padded; i += kLanes) {
      const Lanes before = c ? load(sums + i) : fill(0.0f);
      store(sums + i, fma(weight, load(other + i), before));
    }
    total = fma(weight, fill(softmax[c * step].sum), total);
  }
  float lanes[kLanes];
  store(lanes, total);
  for (int64_t i = 0; i < h.size; i++) y[i] = sums[i] / lanes[0];
}

template <typename T>
Code<T> code() {
  return {attend_chunk<T>, combine};
}
