// Where a tile stands, which keys its rows see, and what a score becomes.

// Everything optional that is a tensor; the constants say which of them are there.
struct Operands {
  device const int* kv_lens;
  device const int* kv_starts;
  device const int* q_offset;
  device const char* mask;
  device const BIAS* bias;
  device const float* slopes;
  device const float* sinks;
  device const int* q_segments;
  device const int* k_segments;
  device const int* cu_seqlens_q;
  device const int* cu_seqlens_k;
  device const int* page_table;
};

// A request, or a packed member: its rows, its first live key and the end of them, its keys, the position of its
// row 0; entry i_b of the batch has its rows from first_q on and its keys from first_k on.
struct Place {
  int rows, start, live, keys;
  long position;
  int i_b, first_q, first_k;
};

// Row i sees keys [i + lo, i + hi), as far as order and distance go.
struct Band {
  int lo, hi;
};

// Blocks [lo, hi), of which [full_lo, full_hi) hide nothing.
struct Blocks {
  int lo, hi, full_lo, full_hi;
};

// Operands that hide pairs, whatever lengths and distances say.
#define HIDES (HAS_MASK || HAS_SEGMENTS)

// A call as single pairs look at it: which request, and the query head.
struct Call {
  Operands x;
  Place place;
  Band band;
  int i_b, i_h;
};

// The packed member that tile i_t of SIZE positions belongs to, and which of its tiles it is: member b has room
// for its tiles from first * pack / SIZE + b on, and what lies behind the last member counts as one more.
template <int SIZE>
int find_member(device const int* bounds, int members, int total, int pack, thread int& i_t) {
  int lo = 0, hi = members;
  while (lo < hi) {
    const int middle = (lo + hi + 1) / 2;
    if (clamp(bounds[middle], 0, total) * pack / SIZE + middle <= i_t) {
      lo = middle;
    } else {
      hi = middle - 1;
    }
  }
  i_t -= clamp(bounds[lo], 0, total) * pack / SIZE + lo;
  return lo;
}

// First position of a member, and how many it has; bounds that fall or leave the tensor make it shorter.
static int find_span(device const int* bounds, int i_b, int members, int total, thread int& first) {
  first = clamp(bounds[i_b], 0, total);
  return (i_b < members ? clamp(bounds[i_b + 1], first, total) : total) - first;
}

static Place find_place(thread const Operands& x, constant Numbers& n, int i_b) {
  Place place = {int(n.seqlen_q), 0, int(n.seqlen_k), int(n.seqlen_k), 0, i_b, 0, 0};
  const bool owned = i_b < n.batch;
  if (VARLEN) {
    place.i_b = 0;
    place.rows = find_span(x.cu_seqlens_q, i_b, n.batch, n.seqlen_q, place.first_q);
    if (!PAGED) place.keys = find_span(x.cu_seqlens_k, i_b, n.batch, n.seqlen_k, place.first_k);
    place.live = owned ? place.keys : 0;
  }
  if (HAS_KV_LENS) place.live = owned ? clamp(x.kv_lens[i_b], 0, place.live) : 0;
  if (HAS_KV_STARTS) place.start = owned ? max(x.kv_starts[i_b], 0) : 0;
  place.position = place.live - place.rows;
  if (HAS_OFFSET) place.position = n.offset;
  if (HAS_Q_OFFSET) place.position = owned ? x.q_offset[i_b] : 0;
  return place;
}

// Where a request's rows stand in q and all that is like it, and where its keys do.
static Layout row_layout(thread const Place& place) { return {place.first_q, false, nullptr, 0, 0, 0}; }

static Layout key_layout(thread const Operands& x, constant Numbers& n, thread const Place& place, int i_b) {
  Layout layout = {place.first_k, false, nullptr, 0, 0, 0};
  if (PAGED) layout = {0, true, x.page_table + i_b * n.table.b, n.table.c, int(n.table.size), int(n.table.pages)};
  return layout;
}

static int within(long x, thread const Place& place) {
  return x < -place.rows ? -place.rows : x > place.live ? place.live : int(x);
}

static Band find_band(thread const Place& place, constant Numbers& n) {
  Band band = {-place.rows, place.live};
  if (HAS_LEFT) band.lo = within(place.position - n.left, place);
  if (HAS_RIGHT) band.hi = within(place.position + n.right + 1, place);
  return band;
}

// Blocks [lo, hi) of SIZE positions that a span [first, end) meets, and those that [all_first, all_end) holds
// whole.
template <int SIZE>
Blocks blocks_of(int first, int end, int all_first, int all_end) {
  Blocks blocks = {first / SIZE, end > first ? (end + SIZE - 1) / SIZE : first / SIZE, 0, 0};
  blocks.full_lo = clamp((max(all_first, first) + SIZE - 1) / SIZE, blocks.lo, blocks.hi);
  blocks.full_hi = clamp(max(min(all_end, end), 0) / SIZE, blocks.full_lo, blocks.hi);
  return blocks;
}

// Key blocks that some of the rows i_first to i_last visits, full where every row sees them whole.
template <int SIZE>
Blocks block_range(int i_first, int i_last, thread const Place& place, Band band) {
  i_last = min(i_last, place.rows - 1);
  const int lo = max(max(i_first + band.lo, place.start), 0), hi = max(min(i_last + band.hi, place.live), lo);
  Blocks blocks = blocks_of<SIZE>(lo, hi, max(i_last + band.lo, place.start), min(i_first + band.hi, place.live));
  if (!SKIP) {
    blocks.lo = 0;
    blocks.hi = (place.live + SIZE - 1) / SIZE;
  }
  return blocks;
}

// Row blocks of which some row sees a key of [j_first, j_end): the inverse of `block_range`.
template <int SIZE>
Blocks row_range(int j_first, int j_end, thread const Place& place, Band band) {
  const int first = max(j_first, place.start), end = min(j_end, place.live);
  const bool some = end > first, whole = first == j_first && end == j_end;
  const int lo = some ? max(first - band.hi + 1, 0) : 0, hi = some ? max(min(end - band.lo, place.rows), lo) : lo;
  Blocks blocks = blocks_of<SIZE>(lo, hi, j_end - band.hi, whole ? j_first - band.lo + 1 : 0);
  if (!SKIP && some) {
    blocks.lo = 0;
    blocks.hi = (place.rows + SIZE - 1) / SIZE;
  }
  return blocks;
}

static long plane_offset(constant Plane& x, int i_b, int i_h, int i, int j) {
  return i_b * x.b + i_h * x.h + i * x.q + j * x.k;
}

// Does row i see key j? Only a bias that is -inf hides a key.
static bool visible(int i, int j, thread const Call& call, constant Numbers& n) {
  thread const Place& place = call.place;
  const int lo = max(i + call.band.lo, place.start), hi = min(i + call.band.hi, place.live);
  if (i >= place.rows || j < lo || j >= hi) return false;
  if (HAS_MASK && call.x.mask[plane_offset(n.mask, call.i_b, call.i_h, i, j)] == 0) return false;
  if (HAS_SEGMENTS && call.x.q_segments[call.i_b * n.q_ids.b + i * n.q_ids.s] !=
                          call.x.k_segments[call.i_b * n.k_ids.b + j * n.k_ids.s])
    return false;
  if (HAS_BIAS) return float(call.x.bias[plane_offset(n.bias, call.i_b, call.i_h, i, j)]) != minus_infinity();
  return true;
}

// scale·s, capped, with bias and ALiBi, in natural units. `cap` becomes the capped score over its cap.
static float change_score(float s, int i, int j, thread const Call& call, constant Numbers& n, constant Factors& f,
                          thread float& cap) {
  s *= f.scale;
  if (SOFTCAP) {
    cap = precise::tanh(s / f.softcap);
    s = cap * f.softcap;
  }
  if (HAS_BIAS) s += float(call.x.bias[plane_offset(n.bias, call.i_b, call.i_h, i, j)]);
  if (HAS_SLOPES) {
    const long far = i + call.place.position - j;
    s -= call.x.slopes[call.i_b * n.slopes.b + call.i_h * n.slopes.h] * float(far < 0 ? -far : far);
  }
  return s;
}

// The weight of a pair that is seen, from its product s and the lse of its row.
static float weight_again(float s, float row_lse, int i, int j, thread const Call& call, constant Numbers& n,
                          constant Factors& f, thread float& cap) {
  const float x = (CHANGED ? change_score(s, i, j, call, n, f, cap) : s * f.scale) - row_lse;
  return BASE2 ? exp2(x * LOG2E) : exp(x);
}

// The score of a pair as the online softmax takes it: -inf where hidden, whatever was there. Of a block that
// is full only operands can hide a pair.
static float apply_mask(float s, int i, int j, bool full, thread const Call& call, constant Numbers& n,
                        constant Factors& f) {
  s = NEGATIVE ? -s : s;
  if (full && !(CHANGED || HIDES)) return s;
  if (!visible(i, j, call, n)) return minus_infinity();
  float cap = 0.0f;
  return CHANGED ? change_score(s, i, j, call, n, f, cap) : s;
}

// Does dropout keep the weight of row i and key j? Word j % 4 of Philox4x32-10 (Salmon et al., SC11) of the counter
// (j / 4, i, head + heads * batch, 0), the same on every backend.
static bool keep(int i, int j, thread const Call& call, constant Numbers& n) {
  uint w[4] = {uint(j) / 4, uint(i), uint(n.num_heads * call.i_b + call.i_h), 0};
  uint seed_lo = n.seed_lo, seed_hi = n.seed_hi;
  for (int turn = 0; turn < 10; ++turn) {
    const uint x = w[0], y = w[2];
    w[0] = mulhi(y, 0xcd9e8d57u) ^ w[1] ^ seed_lo;
    w[1] = y * 0xcd9e8d57u;
    w[2] = mulhi(x, 0xd2511f53u) ^ w[3] ^ seed_hi;
    w[3] = x * 0xd2511f53u;
    seed_lo += 0x9e3779b9u;
    seed_hi += 0xbb67ae85u;
  }
  return w[j & 3] >= uint(n.drop_below);
}

// x of a pair after dropout: a weight, or its gradient.
static float dropped(float x, int i, int j, thread const Call& call, constant Numbers& n, constant Factors& f) {
  return !DROPOUT ? x : keep(i, j, call, n) ? x * f.keep_scale : 0.0f;
}

// What the NaN and infinities among values [first, end) add to a row that sees them: 0, ±inf or NaN. Values
// were read as 0 in their places: a weight of 0 times a hidden one is NaN.
template <typename Rows>
struct NonFinite {
  bool any;
  thread const Rows* values;
  int i, first, end;
  thread const Call* call;
  constant Numbers* n;

  float at(int channel) const {
    float sum = 0.0f;
    for (int j = first; any && j < end; ++j) {
      const float x = values->one(j, channel);
      if (is_odd(x) && visible(i, j, *call, *n)) sum += x;
    }
    return sum;
  }
};

// A sink joins the denominator: l and what older sums are multiplied by, under the new maximum m.
static void join_sink(float sink, thread float& m, thread float& l, thread float& older) {
  float top = max(l == 0.0f ? minus_infinity() : m, sink);
  top = top == minus_infinity() ? 0.0f : top;
  older = l == 0.0f ? 0.0f : exp2((m - top) * LOG2E);
  l = l * older + exp2((sink - top) * LOG2E);
  m = top;
}
