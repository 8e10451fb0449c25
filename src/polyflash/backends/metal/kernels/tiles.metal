// Tiles: rows in threadgroup memory, products of 8 x 8 matrices, and what single lanes do to them.
//
// A simdgroup owns 8 rows. Of its strip, 8 rows in threadgroup memory, lane 4r + c has row r and every 4th
// column from c on: a value of a row is known to 4 lanes, which are neighbours. Matrices are filled, loaded,
// multiplied and stored, never taken apart: which lane holds which element is no documented fact.

constant constexpr int PAD = 4;  // floats behind each row of a tile, so that columns lie in different banks
constant constexpr float LOG2E = 1.4426950408889634f;
constant constexpr float LN2 = 0.6931471805599453f;
constant constexpr float LOWEST = -3.4028234663852886e38f;  // of finite floats
constant constexpr uint INFINITE = 0x7f800000u;             // bits: fast math knows no such values

static float minus_infinity() { return as_type<float>(INFINITE | 0x80000000u); }
static bool is_odd(float x) { return (as_type<uint>(x) & INFINITE) == INFINITE; }

// The largest and the sum of 4 lanes' values of a row.
static float row_max(float x) {
  x = max(x, simd_shuffle_xor(x, ushort(1)));
  return max(x, simd_shuffle_xor(x, ushort(2)));
}

static float row_sum(float x) {
  x += simd_shuffle_xor(x, ushort(1));
  return x + simd_shuffle_xor(x, ushort(2));
}

// Where the rows of a request stand: one after the other from `first` on, or in the pages that a table names.
struct Layout {
  int first;
  bool paged;
  device const int* table;
  long column;
  int size, pages;
};

// A row's page, -1 of none, and its place there; without pages all rows are in page 0.
struct Slot {
  int page, row;
};

static Slot find_slot(thread const Layout& layout, int j) {
  if (!layout.paged) return {0, layout.first + j};
  const int page = layout.table[j / layout.size * layout.column];
  return {page < layout.pages ? page : -1, j % layout.size};
}

// The rows of one head as they are stored: values of T; or, of BITS, codes of so many bits, where blocks of
// TOKENS by CHANNELS have one scale and others one shift (0 tokens are all, -1: there are no shifts).
//
//     value = code * scale + shift
template <int BITS, int TOKENS, int CHANNELS, int SHIFT_TOKENS, int SHIFT_CHANNELS>
struct Stored {
  device const uchar* x;
  View stride;
  int dim;
  Layout layout;
  device const float* scales;
  View scale;
  device const float* shifts;
  View shift;

  // Channels c to c + 3 of row j, 0 behind the last; c is a multiple of 4.
  float4 four(int j, int c) const {
    const Slot slot = find_slot(layout, j);
    float4 piece = float4(0.0f);
    if (slot.page < 0) return piece;
    const int many = min(4, dim - c);
    const long row = slot.page * stride.b + slot.row * stride.s;
    if (BITS == 0) {
      device const T* p = (device const T*)x + row + c;
      if (VECTOR) return float4(*(device const vec<T, 4>*)p);
      for (int i = 0; i < many; ++i) piece[i] = float(p[i]);
      return piece;
    }
    device const uchar* p = x + row + c * BITS / 8;
    uint word = 0;
    if (VECTOR) {
      word = BITS == 8 ? *(device const uint*)p : *(device const ushort*)p;
    } else {
      for (int i = 0; i < many * BITS / 8; ++i) word |= uint(p[i]) << 8 * i;
    }
    for (int i = 0; i < many; ++i) {
      const int code = int(word >> BITS * i & ((1u << BITS) - 1u));
      piece[i] = float(BITS == 8 ? (code ^ 128) - 128 : code - 8) * scales[place<TOKENS, CHANNELS>(scale, slot, c + i)];
      if (SHIFT_TOKENS >= 0) piece[i] += shifts[place<SHIFT_TOKENS, SHIFT_CHANNELS>(shift, slot, c + i)];
    }
    return piece;
  }

  float one(int j, int c) const { return four(j, c / 4 * 4)[c % 4]; }

  template <int OF_TOKENS, int OF_CHANNELS>
  static long place(View at, Slot slot, int c) {
    const int tokens = OF_TOKENS > 0 ? slot.row / max(OF_TOKENS, 1) : 0;
    return slot.page * at.b + tokens * at.s + (OF_CHANNELS > 0 ? c / max(OF_CHANNELS, 1) : 0) * at.d;
  }
};
typedef Stored<0, 0, 0, -1, 0> Values;

// The rows of head i_h of a tensor of values.
static Values values_of(device const T* x, View stride, int i_b, int i_h, int dim, Layout layout) {
  return {(device const uchar*)(x + i_b * stride.b + i_h * stride.h), stride, dim, layout, nullptr, {}, nullptr, {}};
}

// Rows [first, first + ROWS) of one head as floats, 0 behind row `end` and the last channel. Tells whether this
// thread read a NaN or an infinity; with CLEAN there is 0 in their places.
template <int ROWS, int WIDTH, int THREADS, bool CLEAN, typename Rows>
bool load_tile(threadgroup float* tile, thread const Rows& rows, int first, int end, int thread_index) {
  bool odd = false;
  for (int e = thread_index; e < ROWS * (WIDTH / 4); e += THREADS) {
    const int r = e / (WIDTH / 4), c = e % (WIDTH / 4) * 4;
    float4 piece = float4(0.0f);
    if (first + r < end && c < rows.dim) piece = rows.four(first + r, c);
    for (int i = 0; i < 4; ++i) {
      const bool bad = is_odd(piece[i]);
      odd = odd || bad;
      piece[i] = CLEAN && bad ? 0.0f : piece[i];
    }
    *(threadgroup float4*)(tile + r * (WIDTH + PAD) + c) = piece;
  }
  return odd;
}

// 0 for what is not finite in a tile that is loaded.
template <int ROWS, int WIDTH, int THREADS>
void clean_tile(threadgroup float* tile, int thread_index) {
  for (int e = thread_index; e < ROWS * WIDTH; e += THREADS) {
    threadgroup float& x = tile[e / WIDTH * (WIDTH + PAD) + e % WIDTH];
    x = is_odd(x) ? 0.0f : x;
  }
}

// strip = a @ bᵀ, of 8 rows and COLUMNS rows of a tile. `a` are matrices of the 8 rows.
template <int WIDTH, int COLUMNS>
void multiply_turned(threadgroup float* strip, thread const simdgroup_float8x8* a, threadgroup const float* b) {
  UNROLL for (int c = 0; c < COLUMNS / 8; ++c) {
    simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    UNROLL for (int d = 0; d < WIDTH / 8; ++d) {
      simdgroup_float8x8 right;
      simdgroup_load(right, b + 8 * c * (WIDTH + PAD) + 8 * d, WIDTH + PAD, ulong2(0, 0), true);
      simdgroup_multiply_accumulate(sum, a[d], right, sum);
    }
    simdgroup_store(sum, strip + 8 * c, COLUMNS + PAD);
  }
}

// The same of 8 rows in threadgroup memory.
template <int WIDTH, int COLUMNS>
void multiply_turned(threadgroup float* strip, threadgroup const float* a, threadgroup const float* b) {
  UNROLL for (int c = 0; c < COLUMNS / 8; ++c) {
    simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    UNROLL for (int d = 0; d < WIDTH / 8; ++d) {
      simdgroup_float8x8 left, right;
      simdgroup_load(left, a + 8 * d, WIDTH + PAD);
      simdgroup_load(right, b + 8 * c * (WIDTH + PAD) + 8 * d, WIDTH + PAD, ulong2(0, 0), true);
      simdgroup_multiply_accumulate(sum, left, right, sum);
    }
    simdgroup_store(sum, strip + 8 * c, COLUMNS + PAD);
  }
}

// acc += strip @ b over columns [first, end) of the strip, which are rows of the tile b. If `alone` they are
// summed by themselves, and added as a product with `one`: thousands of keys have the error of few sums then.
template <int WIDTH, int COLUMNS>
void multiply_add(thread simdgroup_float8x8* acc, threadgroup const float* strip, threadgroup const float* b, int first,
                  int end, bool alone, thread const simdgroup_float8x8& one) {
  UNROLL for (int d = 0; d < WIDTH / 8; ++d) {
    simdgroup_float8x8 sum = alone ? make_filled_simdgroup_matrix<float, 8, 8>(0.0f) : acc[d];
    for (int c = first / 8; c < end / 8; ++c) {
      simdgroup_float8x8 left, right;
      simdgroup_load(left, strip + 8 * c, COLUMNS + PAD);
      simdgroup_load(right, b + 8 * c * (WIDTH + PAD) + 8 * d, WIDTH + PAD);
      simdgroup_multiply_accumulate(sum, left, right, sum);
    }
    if (alone) {
      simdgroup_multiply_accumulate(acc[d], one, sum, acc[d]);
    } else {
      acc[d] = sum;
    }
  }
}

// Each row of acc times its alpha, COLUMNS channels at a time, by way of the strip. No product of matrices: a
// row that is NaN must not reach its neighbours.
template <int WIDTH, int COLUMNS>
void rescale(thread simdgroup_float8x8* acc, float alpha, threadgroup float* strip, ushort lane) {
  threadgroup float* own = strip + (lane >> 2) * (COLUMNS + PAD);
  UNROLL for (int c = 0; c < WIDTH; c += COLUMNS) {
    constexpr int most = COLUMNS;
    const int width = min(most, WIDTH - c);
    UNROLL for (int d = 0; d < COLUMNS / 8; ++d)
      if (c + 8 * d < WIDTH) simdgroup_store(acc[c / 8 + d], strip + 8 * d, COLUMNS + PAD);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int e = lane & 3; e < width; e += 4) own[e] *= alpha;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int d = 0; d < COLUMNS / 8; ++d)
      if (c + 8 * d < WIDTH) simdgroup_load(acc[c / 8 + d], strip + 8 * d, COLUMNS + PAD);
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// x·factor / divisor of each row of acc, and what `extra` adds to a channel, written to the row at `to`,
// `dim` channels; nothing where the row is not `there`.
template <int WIDTH, int COLUMNS, typename X, typename Extra>
void store_tile(device X* to, thread const simdgroup_float8x8* acc, float factor, float divisor, bool there, int dim,
                thread const Extra& extra, threadgroup float* strip, ushort lane) {
  threadgroup const float* own = strip + (lane >> 2) * (COLUMNS + PAD);
  UNROLL for (int c = 0; c < WIDTH; c += COLUMNS) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int d = 0; d < COLUMNS / 8; ++d)
      if (c + 8 * d < WIDTH) simdgroup_store(acc[c / 8 + d], strip + 8 * d, COLUMNS + PAD);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int e = lane & 3; there && e < COLUMNS && c + e < dim; e += 4)
      to[c + e] = X(own[e] * factor / divisor + extra.at(c + e));
  }
}

struct Nothing {
  float at(int) const { return 0.0f; }
};
