// Suffix decoding on the device: learn, append to the memory, draft.
//
// The same rules as suffix_update.py and suffix_draft.py, which say what the results
// must be, bit for bit; docs/suffix.md says why. Everything is integer; what several
// threads change goes through atomics whose outcome does not depend on their order.
//
// Compiled at warm-up with the settings as macros (see suffix_cuda.py):
// K, WINDOW, PAGE, NUM_PAGES, NUM_BUCKETS, WAYS, NUM_KEYS, KEY_MASKS, ...

typedef long long int64;
typedef unsigned int uint32;

#define NUM_CLASSES 8
#define NUM_PREDICTIONS 24
#define NUM_BINS (NUM_PREDICTIONS * 5 * 4 * 3 * 2)

enum { UID, NAMESPACE, FLAGS, COMMITTED, CUR_PAGE, DRAFT_LEN, DRAFT_NUM, DRAFT_VALID,
       NUMBER, LEARNER, PAGES };
enum { PAGE_SEQ, PAGE_UID, PAGE_NAMESPACE, PAGE_LEN, PAGE_PREV, PAGE_NEXT, PAGE_BASE };
enum { NEXT_PAGE, NEWEST_UID };
enum { THRESHOLD, WASTE, ACCEPTED, ROUNDS };
// Where a draft came from.
enum { OWN, MEMORY };
#define SLOT_FIELDS 11
#define PAGE_FIELDS 8
#define STEERING_FIELDS 4
// Of a request in `growth`: start, number, old page, its room, new pages, the first of
// them, draft positions that were seen.
#define GROWTH_FIELDS 8
#define MAX_KEY_TOKENS 8

// A response token of the own row counts RESPONSE_WEIGHT, all of them must fit 8 bits.
#define MAX_OWN 120
#define MEMORY_PLACES 128
#define PLACES 256

// One more than NUM_KEYS, which may be 0: the reference scoring needs none.
__constant__ const int key_masks[NUM_KEYS + 1] = KEY_MASKS;

struct Memory {
  int* tokens;   // [NUM_PAGES, PAGE]
  int* pages;    // [NUM_PAGES, PAGE_FIELDS]
  int* table;    // [NUM_KEYS, NUM_BUCKETS, WAYS]
  int* counters; // [2]
  int* links;    // [NUM_KEYS, NUM_PAGES, PAGE]
};

__device__ __forceinline__ uint32 hash_step(uint32 h, uint32 value) {
  h = (h ^ value) * 0x85EBCA6Bu;
  return h ^ (h >> 15);
}

__device__ __forceinline__ uint32 hash_start(int name_space, int mask) {
  return hash_step((uint32)name_space * 0x9E3779B1u, (uint32)mask);
}

// The way of a page's first token: of which request of its namespace, its how-manieth.
__device__ __forceinline__ int page_base(int number, int ordinal) {
  return (int)(hash_step((uint32)number * 0x9E3779B1u, (uint32)ordinal) % WAYS);
}

__device__ __forceinline__ const int* page_info(const Memory& m, int page) {
  return m.pages + (int64)(page % NUM_PAGES) * PAGE_FIELDS;
}

__device__ __forceinline__ bool is_live(const Memory& m, int page) {
  return page >= 0 && page_info(m, page)[PAGE_SEQ] == page;
}

__device__ __forceinline__ int token_at(const Memory& m, int page, int offset) {
  return m.tokens[(int64)(page % NUM_PAGES) * PAGE + offset];
}

// The first token of the ring; what is older ends a chain.
__device__ __forceinline__ int oldest_seq(const Memory& m) {
  return max(0, m.counters[NEXT_PAGE] - NUM_PAGES) * PAGE;
}

// The place that follows `seq` in a chain, an older one or -1.
__device__ __forceinline__ int* link_of(const Memory& m, int key, int seq) {
  int64 at = (int64)(seq / PAGE % NUM_PAGES) * PAGE + seq % PAGE;
  return m.links + (int64)key * NUM_PAGES * PAGE + at;
}

// Reads the tokens that a key names at a place in a live page, newest first; -1 if some
// of them are gone, else how many.
__device__ int read_key(const Memory& m, int seq, int mask, int* tokens) {
  int page = seq / PAGE, offset = seq % PAGE, num = 0;
  for (int back = 0; mask >> back; back++) {
    if (offset < 0) {
      page = page_info(m, page)[PAGE_PREV];
      if (!is_live(m, page)) return -1;
      offset = PAGE - 1;
    }
    if ((mask >> back) & 1) tokens[num++] = token_at(m, page, offset);
    offset--;
  }
  return num;
}

// ---------------------------------------------------------------------------------
// Learn: one warp a request. Lane q holds prediction q.

extern "C" __global__ void suffix_learn(
    const int* token_ids, int64 token_ids_stride, const int64* idx_mapping,
    const int* total_len, const int* num_sampled, int num_reqs, int* slots,
    const int* pending_tokens, const int* pending_predicted, const int* pending_bins,
    int* learned, int* steering, int* growth) {
  int batch_idx = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  int lane = threadIdx.x % 32;
  if (batch_idx >= num_reqs) return;
  int* seen = growth + (int64)batch_idx * GROWTH_FIELDS + 6;
  int64 slot = idx_mapping[batch_idx];
  int* fields = slots + slot * SLOT_FIELDS;
  int start = num_sampled[batch_idx] > 0 ? fields[DRAFT_LEN] : -1;
  if (start < 0) {
    if (lane == 0) *seen = 0;
    return;
  }
  learned += (int64)fields[LEARNER] * NUM_BINS * 2;
  steering += (int64)fields[LEARNER] * STEERING_FIELDS;
  const int* row = token_ids + slot * token_ids_stride;
  int num = min(fields[DRAFT_NUM], total_len[slot] - start);
  int right = 0;
  bool missed = false;
  for (int j = 0; j < num; j++) {
    int truth = row[start + j];
    if (lane < NUM_PREDICTIONS) {
      int64 at = (slot * K + j) * NUM_PREDICTIONS + lane;
      int bin = pending_bins[at];
      if (bin >= 0) {
        atomicAdd(learned + bin * 2 + 1, 16);
        if (pending_predicted[at] == truth) atomicAdd(learned + bin * 2, 16);
      }
    }
    if (pending_tokens[slot * K + j] != truth) {
      missed = true;
      break;
    }
    right++;
  }
  __syncwarp();
  if (lane == 0) {
    int valid = fields[DRAFT_VALID];
    if (missed && valid > right) atomicAdd(steering + WASTE, valid - right);
    if (min(right, valid) > 0) atomicAdd(steering + ACCEPTED, min(right, valid));
    atomicAdd(steering + ROUNDS, 1);
    fields[DRAFT_LEN] = -1;
    *seen = right + missed;
  }
}

// ---------------------------------------------------------------------------------
// Plan: one block of 1024 threads. Steers the thresholds, gives pages out.

struct Growth {
  int start, num, old, room, fresh;
};

__device__ Growth growth_of(
    const Memory& m, const int* fields, int total, int prompt, bool sampled) {
  Growth g = {0, 0, fields[CUR_PAGE], 0, 0};
  int first = max(0, prompt - PROMPT_TAIL);
  g.start = max(fields[COMMITTED], first);
  if (sampled && (fields[FLAGS] & 2))
    g.num = min(max(total - g.start, 0), MAX_NEW);
  if (is_live(m, g.old)) g.room = PAGE - page_info(m, g.old)[PAGE_LEN];
  g.fresh = (max(g.num - g.room, 0) + PAGE - 1) / PAGE;
  return g;
}

__device__ int block_sum(int value, int* shared) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  value = __reduce_add_sync(0xffffffffu, value);
  __syncthreads();
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  return __reduce_add_sync(0xffffffffu, shared[lane]);
}

extern "C" __global__ void __launch_bounds__(1024) suffix_plan(
    const int64* idx_mapping, const int* total_len, const int* prompt_len,
    const int* num_sampled, int num_reqs, int* tokens, int* pages, int* table,
    int* counters, int* slots, int* growth, int* steering) {
  Memory m = {tokens, pages, table, counters, 0};
  __shared__ int sums[32];
  __shared__ int newest;
  int tid = threadIdx.x;
  if (tid == 0) newest = counters[NEWEST_UID];
  for (int i = tid; i < num_reqs; i += 1024) {
    if (num_sampled[i] <= 0) continue;
    int* row = steering + (int64)slots[idx_mapping[i] * SLOT_FIELDS + LEARNER] *
                              STEERING_FIELDS;
    // Of the requests that share a row, one takes its sums.
    int64 rounds = atomicExch(row + ROUNDS, 0);
    if (rounds <= 0) continue;
    int64 error = (int64)row[WASTE] * 16;
    error += (int64)row[ACCEPTED] * WASTE_SLOPE / 16;
    error -= WASTE_BUDGET * rounds;
    int64 bound = 1 << (WASTE_SHIFT - 3);
    error = min(max(error, -bound), bound);
    int64 now = row[THRESHOLD];
    now += (now * error) >> WASTE_SHIFT;
    row[THRESHOLD] = (int)min(max(now, (int64)MIN_THRESHOLD), (int64)MAX_THRESHOLD);
    row[WASTE] = row[ACCEPTED] = 0;
  }
  __syncthreads();

  // An upper bound of the pages needed decides whether the numbers start afresh.
  int bound = 0;
  for (int i = tid; i < num_reqs; i += 1024) {
    if (num_sampled[i] <= 0) continue;
    int64 slot = idx_mapping[i];
    int* fields = slots + slot * SLOT_FIELDS;
    atomicMax(&newest, fields[UID]);
    Growth g = growth_of(m, fields, total_len[slot], prompt_len[slot], true);
    if (fields[FLAGS] & 2) bound += (g.num + PAGE - 1) / PAGE + 1;
  }
  bound = block_sum(bound, sums);
  int next = counters[NEXT_PAGE];
  __syncthreads();
  if (next + bound >= MAX_PAGE_SEQ) {
    for (int p = tid; p < NUM_PAGES; p += 1024)
      pages[(int64)p * PAGE_FIELDS + PAGE_SEQ] = -1;
    for (int64 e = tid; e < (int64)NUM_KEYS * NUM_BUCKETS * WAYS; e += 1024)
      table[e] = -1;
    next = 0;
    __syncthreads();
  }

  // Pages in batch order: an exclusive sum over the requests, 1024 at a time.
  int first_next = next;
  for (int begin = 0; begin < num_reqs; begin += 1024) {
    int i = begin + tid;
    Growth g = {0, 0, -1, 0, 0};
    bool sampled = i < num_reqs && num_sampled[i] > 0;
    if (sampled) {
      int64 slot = idx_mapping[i];
      g = growth_of(
          m, slots + slot * SLOT_FIELDS, total_len[slot], prompt_len[slot], true);
    }
    int sum = g.fresh;
    for (int d = 1; d < 32; d *= 2) {
      int other = __shfl_up_sync(0xffffffffu, sum, d);
      if (tid % 32 >= d) sum += other;
    }
    __syncthreads();
    if (tid % 32 == 31) sums[tid / 32] = sum;
    __syncthreads();
    int before = 0, total = 0;
    for (int w = 0; w < 32; w++) {
      if (w < tid / 32) before += sums[w];
      total += sums[w];
    }
    if (i < num_reqs) {
      int* out = growth + (int64)i * GROWTH_FIELDS;
      out[0] = g.start;
      out[1] = g.num;
      out[2] = g.old;
      out[3] = g.room;
      out[4] = g.fresh;
      out[5] = next + before + sum - g.fresh;
    }
    next += total;
    __syncthreads();
  }
  if (tid == 0) {
    counters[NEXT_PAGE] = next;
    counters[NEWEST_UID] = newest;
  }
  if (next == first_next) return;
  __syncthreads();

  for (int i = tid; i < num_reqs; i += 1024) {
    const int* g = growth + (int64)i * GROWTH_FIELDS;
    int* fields = slots + idx_mapping[i] * SLOT_FIELDS;
    for (int f = 0; f < g[4]; f++) {
      int page = g[5] + f;
      // Given out and taken again within this step: only the last owner counts.
      if (page < next - NUM_PAGES) continue;
      int* info = pages + (int64)(page % NUM_PAGES) * PAGE_FIELDS;
      info[PAGE_SEQ] = page;
      info[PAGE_UID] = fields[UID];
      info[PAGE_NAMESPACE] = fields[NAMESPACE];
      info[PAGE_LEN] = 0;
      info[PAGE_PREV] = f > 0 ? page - 1 : g[2];
      info[PAGE_NEXT] = f < g[4] - 1 ? page + 1 : -1;
      info[PAGE_BASE] = page_base(fields[NUMBER], fields[PAGES] + f);
    }
    if (g[4] > 0) fields[CUR_PAGE] = g[5] + g[4] - 1;
    fields[PAGES] += g[4];
  }
  __syncthreads();
  for (int i = tid; i < num_reqs; i += 1024) {
    const int* g = growth + (int64)i * GROWTH_FIELDS;
    if (g[4] > 0 && is_live(m, g[2]))
      pages[(int64)(g[2] % NUM_PAGES) * PAGE_FIELDS + PAGE_NEXT] = g[5];
  }
}

// ---------------------------------------------------------------------------------
// Write: one block of 64 threads a request. Ages the bins it has learned, appends its
// tokens, then enters each token and key in a chain: newest first, one place of a key
// and way. What a chain holds does not depend on the order of the writers.

#define LOCKED (-2)

__device__ bool has_key(const Memory& m, int seq, int mask, const int* want, int name) {
  int page = seq / PAGE, tokens[MAX_KEY_TOKENS];
  if (!is_live(m, page) || page_info(m, page)[PAGE_NAMESPACE] != name) return false;
  int num = read_key(m, seq, mask, tokens);
  for (int i = 0; i < num; i++)
    if (tokens[i] != want[i]) return false;
  return num >= 0;
}

// Put `seq` into the chain that begins with `first`; returns what it begins with now.
// All places of a chain have one way.
__device__ int insert(
    const Memory& m, int first, int seq, int key, const int* want, int name, int oldest) {
  int mask = key_masks[key];
  int before = -1, at = first;
  for (; at > seq && at >= oldest; at = *link_of(m, key, at)) {
    if (has_key(m, at, mask, want, name)) return first;
    before = at;
  }
  if (at < oldest) at = -1;
  int older = at, above = -1;
  while (older >= oldest && !has_key(m, older, mask, want, name)) {
    above = older;
    older = *link_of(m, key, older);
  }
  if (older >= oldest) {
    int rest = *link_of(m, key, older);
    if (above < 0)
      at = rest;
    else
      *link_of(m, key, above) = rest;
  }
  *link_of(m, key, seq) = at;
  if (before < 0) return seq;
  *link_of(m, key, before) = seq;
  return first;
}

__device__ void enter(const Memory& m, int seq, int key, int oldest) {
  const int* info = page_info(m, seq / PAGE);
  int name = info[PAGE_NAMESPACE], mask = key_masks[key], want[MAX_KEY_TOKENS];
  int num = read_key(m, seq, mask, want);
  if (num < 0) return;
  uint32 h = hash_start(name, mask);
  for (int i = 0; i < num; i++) h = hash_step(h, (uint32)want[i]);
  int64 bucket = (int64)key * NUM_BUCKETS + h % NUM_BUCKETS;
  int* head = m.table + bucket * WAYS + (info[PAGE_BASE] + seq % PAGE) % WAYS;
  // The head is the chain's lock too.
  for (bool done = false; !done;) {
    int first = atomicExch(head, LOCKED);
    if (first == LOCKED) {
      __nanosleep(32);
      continue;
    }
    __threadfence();
    first = insert(m, first, seq, key, want, name, oldest);
    __threadfence();
    atomicExch(head, first);
    done = true;
  }
}

extern "C" __global__ void suffix_write(
    const int* token_ids, int64 token_ids_stride, const int64* idx_mapping,
    const int* growth, int* tokens, int* pages, int* table, int* counters, int* slots,
    int* links, const int* pending_bins, int* learned) {
  Memory m = {tokens, pages, table, counters, links};
  const int* g = growth + (int64)blockIdx.x * GROWTH_FIELDS;
  int start = g[0], num = g[1], old = g[2], room = g[3], base = g[5], seen = g[6];
  int64 slot = idx_mapping[blockIdx.x];
  int* fields = slots + slot * SLOT_FIELDS;
  // Others may halve the same bin: both numbers change at once, to the same values.
  long long* bins = (long long*)learned + (int64)fields[LEARNER] * NUM_BINS;
  for (int i = threadIdx.x; i < seen * NUM_PREDICTIONS; i += blockDim.x) {
    int bin = pending_bins[slot * K * NUM_PREDICTIONS + i];
    if (bin < 0) continue;
    long long both = *(volatile long long*)(bins + bin);
    uint32 good = (uint32)both, all = (uint32)(both >> 32);
    if (all <= MAX_OBSERVATIONS) continue;
    while (all > MAX_OBSERVATIONS) {
      all >>= 1;
      good >>= 1;
    }
    *(volatile long long*)(bins + bin) = (long long)all << 32 | good;
  }
  if (num <= 0) return;
  const int* row = token_ids + slot * token_ids_stride;
  for (int t = threadIdx.x; t < num; t += blockDim.x) {
    int over = t - room;
    int page = over < 0 ? old : base + over / PAGE;
    int offset = over < 0 ? PAGE + over : over % PAGE;
    if (!is_live(m, page)) continue;
    int64 at = page % NUM_PAGES;
    tokens[at * PAGE + offset] = row[start + t];
    atomicMax(pages + at * PAGE_FIELDS + PAGE_LEN, offset + 1);
  }
  __syncthreads();
  if (threadIdx.x == 0) fields[COMMITTED] = start + num;
#if NUM_KEYS > 0
  int oldest = oldest_seq(m);
  for (int i = threadIdx.x; i < num * NUM_KEYS; i += blockDim.x) {
    int over = i / NUM_KEYS - room;
    int seq = over < 0 ? (old + 1) * PAGE + over : base * PAGE + over;
    if (is_live(m, seq / PAGE)) enter(m, seq, i % NUM_KEYS, oldest);
  }
#endif
}

// ---------------------------------------------------------------------------------
// Draft: one block of 256 threads a request, one candidate a thread.

#define CHUNK (K <= 32 ? 4096 : 2048)
#define HASH_SIZE 512
#define EMPTY (-1)

struct Found {
  // Own places: quality << 27 | position of the next token.
  uint32 keys[MAX_OWN + CHUNK];
  int count, tile;
};

struct Votes {
  int token[HASH_SIZE];
  uint32 words[HASH_SIZE][4]; // own 0..3, own 4..7, memory 0..3, memory 4..7
  int own_age[HASH_SIZE], memory_age[HASH_SIZE];
};

struct Candidates {
  int seq[MEMORY_PLACES];
  int quality[PLACES];
  int place[PLACES]; // own: position; memory: seq
  int token[PLACES];
  int ahead[MEMORY_PLACES][K];
  int tail[32]; // the last tokens of the row, newest first
  int drafted[K];
  uint32 best[NUM_PREDICTIONS];
  int newest[NUM_PREDICTIONS];
  uint32 sums[4];
  int chosen, going;
  int warp_counts[8];
};

__device__ __forceinline__ int match_class(int quality) {
  quality = min(quality, 16);
  if (quality <= 4) return quality - 1;
  if (quality <= 6) return 4;
  if (quality <= 9) return 5;
  return quality <= 15 ? 6 : 7;
}

// The quality of the place before `pos`, whose last token is known to be equal.
__device__ int own_quality(const int* row, const int* tail, int pos, int total) {
  int run = 1;
  while (run < WINDOW && run < pos && row[pos - 1 - run] == tail[run]) run++;
  int again = 0;
  int at = run + 1;
  while (at < WINDOW && at < pos && row[pos - 1 - at] == tail[at]) {
    again++;
    at++;
  }
  return run + again / OWN_GAP;
}

// Keep the MAX_OWN highest keys of the list. All threads call it.
__device__ void keep_best(Found& f) {
  int count = f.count;
  uint32 mine[(MAX_OWN + CHUNK + 255) / 256];
#pragma unroll
  for (int i = 0; i < (MAX_OWN + CHUNK + 255) / 256; i++) {
    int at = threadIdx.x + i * 256;
    mine[i] = at < count ? f.keys[at] : 0;
  }
  uint32 cut = 0;
  for (int bit = 31; bit >= 0; bit--) {
    uint32 attempt = cut | (1u << bit);
    int above = 0;
#pragma unroll
    for (int i = 0; i < (MAX_OWN + CHUNK + 255) / 256; i++) above += mine[i] >= attempt;
    above = __reduce_add_sync(0xffffffffu, above);
    __shared__ int warps[2][8];
    if (threadIdx.x % 32 == 0) warps[bit & 1][threadIdx.x / 32] = above;
    __syncthreads();
    int all = 0;
    for (int w = 0; w < 8; w++) all += warps[bit & 1][w];
    if (all >= MAX_OWN) cut = attempt;
  }
  if (threadIdx.x == 0) f.count = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < (MAX_OWN + CHUNK + 255) / 256; i++)
    if (mine[i] >= cut && mine[i] > 0) f.keys[atomicAdd(&f.count, 1)] = mine[i];
  __syncthreads();
}

__device__ void scan_row(
    Found& f, const Candidates& c, const int* row, int total) {
  int lane = threadIdx.x % 32;
  int last = c.tail[0];
  // Positions [1, total) in chunks; every chunk ends with at most MAX_OWN kept.
  for (int begin = 0; begin < total - 1; begin += CHUNK) {
    int end = min(begin + CHUNK, total - 1);
    // Warps take tiles as they come: some still look into the memory.
    while (true) {
      int tile = 0;
      if (lane == 0) tile = atomicAdd(&f.tile, 128);
      tile = begin + __shfl_sync(0xffffffffu, tile, 0);
      if (tile >= end) break;
      int tokens[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int at = tile + i * 32 + lane;
        tokens[i] = at < end ? row[at] : last ^ 1;
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (tokens[i] != last) continue;
        int pos = tile + i * 32 + lane + 1;
        uint32 quality = own_quality(row, c.tail, pos, total);
        f.keys[atomicAdd(&f.count, 1)] = quality << 27 | pos;
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) f.tile = 0;
    if (f.count > MAX_OWN) keep_best(f);
    __syncthreads();
  }
}

// Compare the text up to a place with the end of the row: bit i is set if the tokens i
// before the end are equal.
__device__ uint32 compare_ends(const Memory& m, int seq, const int* tail, int total) {
  int page = seq / PAGE, offset = seq % PAGE;
  int length = min(WINDOW, total);
  uint32 equal = 0;
  if (offset + 1 >= WINDOW) {
    // The usual case, all in one page: loads that do not wait for each other.
    const int* end = m.tokens + (int64)(page % NUM_PAGES) * PAGE + offset;
#pragma unroll
    for (int back = 0; back < WINDOW; back++)
      equal |= (uint32)(back < length && end[-back] == tail[back]) << back;
    return equal;
  }
  for (int back = 0; back < length; back++) {
    if (offset < 0) {
      page = page_info(m, page)[PAGE_PREV];
      offset = PAGE - 1;
      if (!is_live(m, page)) break;
    }
    equal |= (uint32)(token_at(m, page, offset) == tail[back]) << back;
    offset--;
  }
  return equal;
}

// Look a key and way up and measure the match; quality 0 = no candidate.
__device__ int look_up(
    const Memory& m, const int* fields, const int* tail, int total, int way, int* seq_out) {
  *seq_out = -1;
  int key = way / WAYS;
  way %= WAYS;
  uint32 mask = key_masks[key];
  if (total < 32 - __clz((int)mask) || !(fields[FLAGS] & 1)) return 0;
  uint32 h = hash_start(fields[NAMESPACE], mask);
  for (int back = 0; mask >> back; back++)
    if ((mask >> back) & 1) h = hash_step(h, (uint32)tail[back]);
  int64 bucket = (int64)key * NUM_BUCKETS + h % NUM_BUCKETS;
  int oldest = oldest_seq(m);
  int seq = m.table[bucket * WAYS + way];
  for (; seq >= oldest; seq = *link_of(m, key, seq)) {
    int page = seq / PAGE;
    const int* info = page_info(m, page);
    if (info[PAGE_SEQ] != page || info[PAGE_NAMESPACE] != fields[NAMESPACE]) continue;
    uint32 equal = compare_ends(m, seq, tail, total);
    if ((equal & mask) != mask) continue;
    if (info[PAGE_UID] == fields[UID]) return 0;
    if (m.counters[NEWEST_UID] - info[PAGE_UID] >= MAX_CACHED) return 0;
    *seq_out = seq;
    int run = __ffs(~equal) - 1;
    return run > 0 ? run + (__popc(equal) - run) / MEMORY_GAP : 0;
  }
  return 0;
}

__device__ void read_ahead(const Memory& m, int seq, int* ahead) {
  int page = seq / PAGE, offset = seq % PAGE + 1;
  int length = page_info(m, page)[PAGE_LEN];
  int j = 0;
  if (offset + K <= length) {
    const int* begin = m.tokens + (int64)(page % NUM_PAGES) * PAGE + offset;
#pragma unroll
    for (int i = 0; i < K; i++) ahead[i] = begin[i];
    return;
  }
  for (; j < K; j++) {
    if (offset >= PAGE) {
      page = page_info(m, page)[PAGE_NEXT];
      if (!is_live(m, page)) break;
      length = page_info(m, page)[PAGE_LEN];
      offset = 0;
    }
    if (offset >= length) break;
    ahead[j] = token_at(m, page, offset++);
  }
  for (; j < K; j++) ahead[j] = -1;
}

__device__ bool is_placeholder(const int* placeholder_ids, int num, int token) {
  for (int p = 0; p < num; p++)
    if (placeholder_ids[p] == token) return true;
  return false;
}

extern "C" __global__ void __launch_bounds__(256) suffix_draft(
    const int* token_ids, int64 token_ids_stride, const int64* idx_mapping,
    const int* total_len, const int* prompt_len, const int* num_sampled,
    const int* placeholder_ids, int num_placeholders, int num_steps, int* tokens,
    int* pages, int* table, int* counters, int* slots, int* pending_tokens,
    int* pending_predicted, int* pending_bins, const int* links, const int* learned,
    const int* steering, int* sources, int64* drafts, int* num_drafts,
    float* confidences) {
  __shared__ union {
    Found found;
    Votes votes;
  } u;
  __shared__ Candidates c;
  Memory m = {tokens, pages, table, counters, (int*)links};
  int batch_idx = blockIdx.x, tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  int64 slot = idx_mapping[batch_idx];
  int total = total_len[slot];
  const int* row = token_ids + slot * token_ids_stride;
  int* fields = slots + slot * SLOT_FIELDS;
  bool sampled = num_sampled[batch_idx] > 0;
  int last = total > 0 ? row[total - 1] : row[0];
  int limit = min(min(K, num_steps), MAX_MODEL_LEN - total - 1);
  for (int j = tid; j < K; j += 256) {
    drafts[(int64)batch_idx * K + j] = last;
    confidences[(int64)batch_idx * K + j] = 0.0f;
  }
  if (!sampled || total < 2 || limit <= 0 ||
      is_placeholder(placeholder_ids, num_placeholders, last)) {
    if (tid == 0) {
      num_drafts[slot] = 0;
      sources[slot] = OWN;
      if (sampled) fields[DRAFT_LEN] = -1;
    }
    return;
  }
  if (tid < 32) c.tail[tid] = tid < total ? row[total - 1 - tid] : -1;
  if (tid == 0) u.found.count = u.found.tile = 0;
  __syncthreads();

  // The upper half looks into the memory while the lower half begins with the row.
  int quality = 0, place = -1;
  if (tid >= 128) {
    int way = tid - 128;
    if (way < NUM_KEYS * WAYS) quality = look_up(m, fields, c.tail, total, way, &place);
    c.seq[way] = place;
  }
  scan_row(u.found, c, row, total);
  __syncthreads();
  int own = min(u.found.count, MAX_OWN);
  c.quality[tid] = 0;
  if (tid < 128) {
    if (tid < own) {
      quality = u.found.keys[tid] >> 27;
      place = u.found.keys[tid] & 0x7FFFFFF;
    }
  } else {
    for (int i = 0; i < tid - 128; i++)
      if (c.seq[i] == place) quality = 0;
  }
  __syncthreads();
  // Places by age: how many older candidates of the same source there are.
  if (tid < 128) c.place[tid] = quality > 0 ? place : -1;
  if (tid >= 128) c.place[tid] = quality > 0 ? place : -1;
  __syncthreads();
  if (quality > 0) {
    int begin = tid < 128 ? 0 : 128;
    int rank = 0;
    for (int i = begin; i < begin + 128; i++)
      rank += c.place[i] >= 0 && c.place[i] < place;
    // Own places follow the memory's.
    int at = tid < 128 ? MEMORY_PLACES + rank : rank;
    c.quality[at] = quality;
    c.token[at] = place;
  }
  __syncthreads();
  quality = c.quality[tid];
  place = c.token[tid];
  bool is_own = tid >= MEMORY_PLACES;
  int weight = is_own && place >= prompt_len[slot] ? RESPONSE_WEIGHT : 1;
  if (!is_own && quality > 0) read_ahead(m, place, c.ahead[tid]);
  bool alive = quality > 0;
  uint32 all_right = 65536;
  learned += (int64)fields[LEARNER] * NUM_BINS * 2;
  uint32 threshold = steering[(int64)fields[LEARNER] * STEERING_FIELDS + THRESHOLD] >> 8;
  int num = 0, valid = 0, source = OWN;
  __syncthreads();
  for (int at = tid; at < HASH_SIZE; at += 256) {
    u.votes.token[at] = EMPTY;
    for (int w = 0; w < 4; w++) u.votes.words[at][w] = 0;
    u.votes.own_age[at] = u.votes.memory_age[at] = -1;
  }
  if (tid < NUM_PREDICTIONS) {
    c.best[tid] = 0;
    c.newest[tid] = -1;
  }
  if (tid < 4) c.sums[tid] = 0;
  __syncthreads();

  for (int j = 0; j < limit; j++) {
    int token = -1;
    if (alive) {
      if (!is_own)
        token = c.ahead[tid][j];
      else if (place + j < total)
        token = row[place + j];
      else
        token = c.drafted[place + j - total];
      alive = token >= 0;
    }
    c.token[tid] = token;
    // One hash place a token; whoever opens it speaks for the token below.
    bool speaks = false;
    int at = 0;
    uint32 words[4] = {0, 0, 0, 0};
    if (alive) {
      int level = match_class(quality + j);
      uint32 vote = (uint32)weight << (8 * (level & 3));
      int word = (is_own ? 0 : 2) + (level >> 2);
      words[word] = vote;
      at = (int)(((uint32)token * 0x9E3779B1u) >> 23);
      while (true) {
        int was = atomicCAS(&u.votes.token[at], EMPTY, token);
        if (was == EMPTY) speaks = true;
        if (was == EMPTY || was == token) break;
        at = (at + 1) % HASH_SIZE;
      }
      atomicAdd(&u.votes.words[at][word], vote);
      atomicMax(is_own ? &u.votes.own_age[at] : &u.votes.memory_age[at], tid);
    }
    bool any = __any_sync(0xffffffffu, alive);
    if (any) {
      for (int w = 0; w < 4; w++) {
        uint32 sum = __reduce_add_sync(0xffffffffu, words[w]);
        if (lane == w && sum) atomicAdd(&c.sums[w], sum);
      }
    }
    if (!__syncthreads_or(alive)) break;

    if (__any_sync(0xffffffffu, speaks)) {
      int own_age = -1, memory_age = -1;
      if (speaks) {
        for (int w = 0; w < 4; w++) words[w] = u.votes.words[at][w];
        own_age = u.votes.own_age[at];
        memory_age = u.votes.memory_age[at];
      }
      int age = max(own_age, memory_age);
      uint32 mine = 0, theirs = 0;
      uint32 best = 0;
      int newest = -1;
      for (int b = NUM_CLASSES - 1; b >= 0; b--) {
        if (speaks) {
          mine += (words[b >> 2] >> (8 * (b & 3))) & 255;
          theirs += (words[2 + (b >> 2)] >> (8 * (b & 3))) & 255;
        }
        uint32 both = mine * OWN_WEIGHT + theirs;
        uint32 key[3] = {
            mine ? mine << 8 | own_age : 0, theirs ? theirs << 8 | memory_age : 0,
            both ? both << 8 | age : 0};
        int ages[3] = {mine ? own_age : -1, theirs ? memory_age : -1, both ? age : -1};
#pragma unroll
        for (int x = 0; x < 3; x++) {
          uint32 top = __reduce_max_sync(0xffffffffu, key[x]);
          int late = __reduce_max_sync(0xffffffffu, ages[x]);
          if (lane == x * NUM_CLASSES + b) {
            best = top;
            newest = late;
          }
        }
      }
      if (lane < NUM_PREDICTIONS && best) {
        atomicMax(&c.best[lane], best);
        atomicMax(&c.newest[lane], newest);
      }
    }
    __syncthreads();

    if (warp == 0) {
      // Lane q judges prediction q; the most trusted one is drafted.
      uint32 best = lane < NUM_PREDICTIONS ? c.best[lane] : 0;
      uint32 count = best >> 8;
      int predicted = best ? c.token[best & 255] : -1;
      int bin = -1;
      int order = -1;
      if (best) {
        int source = lane / NUM_CLASSES;
        uint32 mine = 0, theirs = 0;
        for (int b = NUM_CLASSES - 1; b >= lane % NUM_CLASSES; b--) {
          mine += (c.sums[b >> 2] >> (8 * (b & 3))) & 255;
          theirs += (c.sums[2 + (b >> 2)] >> (8 * (b & 3))) & 255;
        }
        uint32 votes = source == 0 ? mine : theirs;
        if (source == 2) votes = mine * OWN_WEIGHT + theirs;
        int share = (count * 4 > votes) + (count * 2 > votes) +
                    (count * 5 > votes * 4) + (count * 100 > votes * 99);
        int size = (count >= 2) + (count >= 3) + (count >= 5);
        int stage = j == 0 ? 0 : (j < 4 ? 1 : 2);
        bin = ((lane * 5 + share) * 4 + size) * 3 + stage;
        bin = bin * 2 + ((int)(best & 255) == c.newest[lane]);
        const uint32* both = (const uint32*)learned + bin * 2;
        uint32 chance = (both[0] << 16) / both[1];
        order = (int)(chance * 32 + lane);
      }
      int winner = __reduce_max_sync(0xffffffffu, order);
      int chosen = __shfl_sync(0xffffffffu, predicted, winner & 31);
      bool blocked = is_placeholder(placeholder_ids, num_placeholders, chosen);
      // The first token decides the source: the own row's prediction of the same class
      // comes first.
      int own_says = chosen;
      if (j == 0)
        own_says = __shfl_sync(0xffffffffu, predicted, winner & (NUM_CLASSES - 1));
      if (!blocked) {
        if (lane < NUM_PREDICTIONS) {
          int64 out = (slot * K + j) * NUM_PREDICTIONS + lane;
          pending_bins[out] = bin;
          if (best) pending_predicted[out] = predicted;
        }
        if (lane == 0) {
          uint32 chance = winner >> 5;
          // 64 bits: a bin that was never wrong has the chance 2^16.
          all_right = (uint32)(((int64)all_right * chance) >> 16);
          num = j + 1;
          pending_tokens[slot * K + j] = chosen;
          uint32 rise = 4 + THRESHOLD_SLOPE * min(j, THRESHOLD_STEPS);
          bool kept = all_right * 4 >= threshold * rise;
          if (kept) {
            valid = j + 1;
            if (own_says != chosen) source = MEMORY;
            drafts[(int64)batch_idx * K + j] = chosen;
            confidences[(int64)batch_idx * K + j] = (float)chance / 65536.0f;
          }
          c.drafted[j] = chosen;
          c.chosen = chosen;
          c.going = kept;
        }
      } else if (lane == 0) {
        c.going = 0;
      }
      __syncwarp();
      if (lane < NUM_PREDICTIONS) {
        c.best[lane] = 0;
        c.newest[lane] = -1;
      }
      if (lane < 4) c.sums[lane] = 0;
    } else {
      // Nobody reads the votes any more: clean them for the next position.
      for (int e = tid - 32; e < HASH_SIZE; e += 224) {
        if (u.votes.token[e] == EMPTY) continue;
        u.votes.token[e] = EMPTY;
        for (int w = 0; w < 4; w++) u.votes.words[e][w] = 0;
        u.votes.own_age[e] = u.votes.memory_age[e] = -1;
      }
    }
    __syncthreads();
    if (!c.going) break;
    alive = alive && token == c.chosen;
  }
  if (tid == 0) {
    num_drafts[slot] = valid;
    sources[slot] = source;
    fields[DRAFT_LEN] = total;
    fields[DRAFT_NUM] = num;
    fields[DRAFT_VALID] = valid;
  }
}
