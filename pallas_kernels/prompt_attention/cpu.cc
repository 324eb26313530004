// A prompt's attention on the CPU, through XLA's FFI: chunks of keys and values go into their rows of
// a cache in pages, and chunks of queries look at their rows, causal, without the scores ever being
// whole.
//
// Keys that a chunk sees are turned about and values brought together once for all of its queries. A row's
// sums run in an order that depends on its own position alone: it has the same bits however prompts
// are cut and whatever else is read with them, in pages of any size, in AVX-512, AVX2 or plain loops.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu_lanes.h"
#include "cpu_pages.h"
#include "cpu_threads.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using namespace zen;

constexpr int kTile = 4;                         // registers of keys, or of a value, worked on at once
constexpr int64_t kKeys = kTile * kLanes;
constexpr int64_t kRows = 6;                     // queries worked on at once
constexpr int64_t kTask = 8 * kRows;             // queries of one task
constexpr int64_t kWritten = 64;                 // positions that one task writes
constexpr int64_t kParallelWork = 1 << 16;       // products below which one thread is faster

// One layer's heads; `padded` is the size in whole lanes.
struct Shape {
  int64_t group, size, padded, window;
  float scale;
};

// What a row has summed so far.
struct Row {
  float largest = kLowest;
  float total[kLanes] = {};
};

using Attend = void (*)(int64_t, const Shape&, const float* const*, const int64_t*, const float*,
                        const float*, float*, float* const*);

namespace plain {
#define ZEN_TARGET
#include "cpu_lanes_plain.h"
#include "cpu_exponential.h"
#include "cpu_attend.h"
#undef ZEN_TARGET
}  // namespace plain

#if defined(__x86_64__)
namespace avx2 {
#define ZEN_TARGET __attribute__((target("avx2,fma")))
#include "cpu_lanes_avx2.h"
#include "cpu_exponential.h"
#include "cpu_attend.h"
#undef ZEN_TARGET
}  // namespace avx2

namespace avx512 {
#define ZEN_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#include "cpu_lanes_avx512.h"
#include "cpu_exponential.h"
#include "cpu_attend.h"
#undef ZEN_TARGET
}  // namespace avx512
#endif

Attend choose(int64_t level) {
  switch (widest(level)) {
#if defined(__x86_64__)
    case kAvx512: return avx512::attend_some;
    case kAvx2: return avx2::attend_some;
#endif
    default: return plain::attend_some;
  }
}

struct Problem {
  const float* q;          // [chunks, tokens, kv_heads, group, size]
  const float* k;          // [chunks, tokens, kv_heads, size], of the same tokens
  const float* v;          // likewise
  float* y;                // as q
  const int32_t* starts;   // [chunks], the first query's position
  const int32_t* lengths;  // [chunks], queries that exist
  int64_t chunks, tokens, kv_heads;
  Shape shape;
  Pages pages;

  // The first position that a query of a chunk sees.
  int64_t first(int64_t c) const {
    return shape.window ? std::max<int64_t>(0, starts[c] + 1 - shape.window) : 0;
  }
  // Queries of a chunk that exist; none where a page that they need is not there.
  int64_t queries(int64_t c) const {
    if (starts[c] < 0) return 0;
    const int64_t room = pages.positions() - starts[c];
    const int64_t count = std::clamp<int64_t>(std::min<int64_t>(lengths[c], room), 0, tokens);
    return count && pages.has_all(c, first(c), starts[c] + count - 1) ? count : 0;
  }
  int64_t seen(int64_t c) const { return queries(c) ? starts[c] + queries(c) : 0; }
};

// Keys and values of some of a chunk's tokens go into the cache.
template <typename T>
void write(const Problem& p, const Side<T>& k, const Side<T>& v, int64_t c, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; t++) {
    const int64_t place = p.pages.place(c, p.starts[c] + t);
    for (int64_t head = 0; head < p.kv_heads; head++) {
      const int64_t at = ((c * p.tokens + t) * p.kv_heads + head) * p.shape.size;
      p.pages.write(k, place, head, p.k + at);
      p.pages.write(v, place, head, p.v + at);
    }
  }
}

// One kv head of a chunk's row: keys [blocks][size][kKeys], zeros behind the last, values
// [positions][padded].
struct Head {
  float *keys, *values;
};

template <typename T>
void bring(const Problem& p, int64_t c, int64_t head, const Side<T>& k, const Side<T>& v,
           const Head& to) {
  const Shape& s = p.shape;
  const int64_t seen = p.seen(c), first = p.first(c);
  for (int64_t at = first / kKeys * kKeys; at < seen; at += kKeys) {
    float* block = to.keys + at * s.size;
    for (int64_t j = 0; j < kKeys; j++) {
      const int64_t position = at + j;
      if (first <= position && position < seen)
        p.pages.read(k, p.pages.place(c, position), head, block + j, kKeys);
      else
        for (int64_t i = 0; i < s.size; i++) block[i * kKeys + j] = 0.0f;
    }
  }
  for (int64_t at = first / kKeys * kKeys; at < seen; at++) {
    float* value = to.values + at * s.padded;
    std::fill(value, value + s.padded, 0.0f);
    if (at >= first) p.pages.read(v, p.pages.place(c, at), head, value, 1);
  }
}

// Some queries of a chunk and a kv head: numbers [begin, end) of tokens x group.
void attend_task(const Problem& p, Attend attend, int64_t c, int64_t head, const Head& from, int64_t begin,
                 int64_t end) {
  const Shape& s = p.shape;
  thread_local std::vector<float> room;
  room.resize(kRows * (kKeys + s.padded));
  for (int64_t n = begin; n < end; n += kRows) {
    const int64_t count = std::min(kRows, end - n);
    const float* q[kRows];
    float* y[kRows];
    int64_t positions[kRows];
    for (int64_t r = 0; r < count; r++) {
      const int64_t t = (n + r) / s.group, g = (n + r) % s.group;
      const int64_t at = (((c * p.tokens + t) * p.kv_heads + head) * s.group + g) * s.size;
      q[r] = p.q + at;
      y[r] = p.y + at;
      positions[r] = p.starts[c] + t;
    }
    attend(count, s, q, positions, from.keys, from.values, room.data(), y);
  }
}

template <typename T>
void attend_all(const Problem& p, ffi::ThreadPool& pool, int64_t level, const Side<T>& k,
                const Side<T>& v) {
  const Shape& s = p.shape;
  std::vector<int64_t> offset(p.chunks + 1);
  int64_t work = 0;
  for (int64_t c = 0; c < p.chunks; c++) {
    const int64_t blocks = (p.seen(c) + kKeys - 1) / kKeys;
    offset[c + 1] = offset[c] + p.kv_heads * blocks * kKeys * (s.size + s.padded);
    work += p.queries(c) * s.group * p.kv_heads * p.seen(c) * s.size;
  }
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < offset.back()) memory = std::vector<float>(offset.back());
  auto of = [&, base = memory.data()](int64_t c, int64_t head) {
    const int64_t room = (p.seen(c) + kKeys - 1) / kKeys * kKeys;
    float* at = base + offset[c] + head * room * (s.size + s.padded);
    return Head{at, at + room * s.size};
  };
  const bool alone = work < kParallelWork;
  const int64_t parts = (p.tokens + kWritten - 1) / kWritten;
  share_out(pool, p.chunks * parts, alone, [&](int64_t i) {
    const int64_t c = i / parts, begin = i % parts * kWritten;
    write(p, k, v, c, begin, std::min(begin + kWritten, p.queries(c)));
  });
  share_out(pool, p.chunks * p.kv_heads, alone, [&](int64_t i) {
    const int64_t c = i / p.kv_heads, head = i % p.kv_heads;
    if (p.queries(c)) bring(p, c, head, k, v, of(c, head));
  });
  // The last queries see most: they are begun first.
  const int64_t tasks = (p.tokens * s.group + kTask - 1) / kTask;
  const Attend attend = choose(level);
  share_out(pool, tasks * p.chunks * p.kv_heads, alone, [&](int64_t i) {
    const int64_t unit = i % (p.chunks * p.kv_heads), c = unit / p.kv_heads, head = unit % p.kv_heads;
    const int64_t begin = (tasks - 1 - i / (p.chunks * p.kv_heads)) * kTask;
    const int64_t end = std::min(begin + kTask, p.queries(c) * s.group);
    if (begin < end) attend_task(p, attend, c, head, of(c, head), begin, end);
  });
}

ffi::Error attend_impl(ffi::ThreadPool pool, int64_t window, int64_t level, ffi::Buffer<ffi::F32> q,
                       ffi::Buffer<ffi::F32> k, ffi::Buffer<ffi::F32> v, ffi::Buffer<ffi::S32> table,
                       ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::S32> lengths, ffi::AnyBuffer,
                       ffi::AnyBuffer, ffi::Buffer<ffi::F32>, ffi::Buffer<ffi::F32>,
                       ffi::ResultBuffer<ffi::F32> y, ffi::Result<ffi::AnyBuffer> keys,
                       ffi::Result<ffi::AnyBuffer> values, ffi::ResultBuffer<ffi::F32> k_scale,
                       ffi::ResultBuffer<ffi::F32> v_scale) {
  const auto qd = q.dimensions(), kd = keys->dimensions();
  Problem p{};
  p.q = q.typed_data();
  p.k = k.typed_data();
  p.v = v.typed_data();
  p.y = y->typed_data();
  p.starts = starts.typed_data();
  p.lengths = lengths.typed_data();
  p.chunks = qd[0];
  p.tokens = qd[1];
  p.kv_heads = qd[2];
  p.shape.group = qd[3];
  p.shape.size = qd[4];
  p.shape.padded = (qd[4] + kLanes - 1) / kLanes * kLanes;
  p.shape.window = window;
  p.shape.scale = 1.0 / std::sqrt(static_cast<double>(qd[4]));
  p.pages = {table.typed_data(), table.dimensions()[1], kd[0], kd[1], kd[2], kd[3]};
  const int64_t row = p.kv_heads * p.shape.group * p.shape.size;
  for (int64_t c = 0; c < p.chunks; c++)
    std::fill(p.y + (c * p.tokens + p.queries(c)) * row, p.y + (c + 1) * p.tokens * row, 0.0f);
  with_sides(*keys, *values, k_scale->typed_data(), v_scale->typed_data(),
             [&](const auto& k, const auto& v) { attend_all(p, pool, level, k, v); });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ZenPromptAttention, attend_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("level")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
