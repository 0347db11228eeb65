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

enum { UID, NAMESPACE, FLAGS, COMMITTED, CUR_PAGE, DRAFT_LEN, DRAFT_NUM, DRAFT_VALID };
enum { PAGE_SEQ, PAGE_UID, PAGE_NAMESPACE, PAGE_LEN, PAGE_PREV, PAGE_NEXT };
enum { NEXT_PAGE, NEWEST_UID, THRESHOLD, WASTE, ACCEPTED, ROUNDS };
#define SLOT_FIELDS 8
#define PAGE_FIELDS 8

// A response token of the own row counts RESPONSE_WEIGHT, all of them must fit 8 bits.
#define MAX_OWN 120
#define MEMORY_PLACES 128
#define PLACES 256

__constant__ const int key_masks[NUM_KEYS] = KEY_MASKS;

struct Memory {
  int* tokens;   // [NUM_PAGES, PAGE]
  int* pages;    // [NUM_PAGES, PAGE_FIELDS]
  int* table;    // [NUM_KEYS, NUM_BUCKETS, WAYS]
  int* counters; // [8]
};

__device__ __forceinline__ uint32 hash_step(uint32 h, uint32 value) {
  h = (h ^ value) * 0x85EBCA6Bu;
  return h ^ (h >> 15);
}

__device__ __forceinline__ uint32 hash_start(int name_space, int mask) {
  return hash_step((uint32)name_space * 0x9E3779B1u, (uint32)mask);
}

__device__ __forceinline__ int hash_way(int seq) {
  return (int)((((uint32)seq * 0x9E3779B1u) >> 16) % WAYS);
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

// ---------------------------------------------------------------------------------
// Learn: one warp a request. Lane q holds prediction q.

extern "C" __global__ void suffix_learn(
    const int* token_ids, int64 token_ids_stride, const int64* idx_mapping,
    const int* total_len, const int* num_sampled, int num_reqs, int* counters,
    int* slots, const int* pending_tokens, const int* pending_predicted,
    const int* pending_bins, int* accepted, int* observed) {
  int batch_idx = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  int lane = threadIdx.x % 32;
  if (batch_idx >= num_reqs || num_sampled[batch_idx] <= 0) return;
  int64 slot = idx_mapping[batch_idx];
  int* fields = slots + slot * SLOT_FIELDS;
  int start = fields[DRAFT_LEN];
  if (start < 0) return;
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
        atomicAdd(observed + bin, 16);
        if (pending_predicted[at] == truth) atomicAdd(accepted + bin, 16);
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
    if (missed && valid > right) atomicAdd(counters + WASTE, valid - right);
    if (min(right, valid) > 0) atomicAdd(counters + ACCEPTED, min(right, valid));
    atomicAdd(counters + ROUNDS, 1);
    fields[DRAFT_LEN] = -1;
  }
}

// ---------------------------------------------------------------------------------
// Plan: one block of 1024 threads. Ages the bins, steers the threshold, gives pages out.

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
    int* counters, int* slots, int* growth, int* accepted, int* observed) {
  Memory m = {tokens, pages, table, counters};
  __shared__ int sums[32];
  __shared__ int newest;
  int tid = threadIdx.x;
  for (int b = tid; b < NUM_BINS; b += 1024) {
    int seen = observed[b], good = accepted[b];
    if (seen > MAX_OBSERVATIONS) {
      while (seen > MAX_OBSERVATIONS) {
        seen >>= 1;
        good >>= 1;
      }
      observed[b] = seen;
      accepted[b] = good;
    }
  }
  if (tid == 0) {
    newest = counters[NEWEST_UID];
    int64 rounds = counters[ROUNDS];
    if (rounds > 0) {
      int64 error = (int64)counters[WASTE] * 16;
      error += (int64)counters[ACCEPTED] * WASTE_SLOPE / 16;
      error -= WASTE_BUDGET * rounds;
      int64 bound = 1 << (WASTE_SHIFT - 3);
      error = min(max(error, -bound), bound);
      int64 now = counters[THRESHOLD];
      now += (now * error) >> WASTE_SHIFT;
      counters[THRESHOLD] =
          (int)min(max(now, (int64)MIN_THRESHOLD), (int64)MAX_THRESHOLD);
    }
    counters[WASTE] = counters[ACCEPTED] = counters[ROUNDS] = 0;
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
      int* out = growth + (int64)i * 8;
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
    const int* g = growth + (int64)i * 8;
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
    }
    if (g[4] > 0) fields[CUR_PAGE] = g[5] + g[4] - 1;
  }
  __syncthreads();
  for (int i = tid; i < num_reqs; i += 1024) {
    const int* g = growth + (int64)i * 8;
    if (g[4] > 0 && is_live(m, g[2]))
      pages[(int64)(g[2] % NUM_PAGES) * PAGE_FIELDS + PAGE_NEXT] = g[5];
  }
}

// ---------------------------------------------------------------------------------
// Write: one block of 64 threads a request, a token each; hash entries with the token.

extern "C" __global__ void suffix_write(
    const int* token_ids, int64 token_ids_stride, const int64* idx_mapping,
    const int* prompt_len, const int* growth, int* tokens, int* pages, int* table,
    int* slots) {
  Memory m = {tokens, pages, table, 0};
  const int* g = growth + (int64)blockIdx.x * 8;
  int start = g[0], num = g[1], old = g[2], room = g[3], base = g[5];
  if (num <= 0) return;
  int64 slot = idx_mapping[blockIdx.x];
  int* fields = slots + slot * SLOT_FIELDS;
  int first = max(0, prompt_len[slot] - PROMPT_TAIL);
  const int* row = token_ids + slot * token_ids_stride;
  for (int t = threadIdx.x; t < num; t += blockDim.x) {
    int over = t - room;
    int page = over < 0 ? old : base + over / PAGE;
    int offset = over < 0 ? PAGE + over : over % PAGE;
    if (!is_live(m, page)) continue;
    int64 at = page % NUM_PAGES;
    tokens[at * PAGE + offset] = row[start + t];
    atomicMax(pages + at * PAGE_FIELDS + PAGE_LEN, offset + 1);
    int seq = page * PAGE + offset;
#pragma unroll
    for (int key = 0; key < NUM_KEYS; key++) {
      int mask = key_masks[key];
      if (start + t - (31 - __clz(mask)) < first) continue;
      uint32 h = hash_start(fields[NAMESPACE], mask);
      for (int back = 0; mask >> back; back++)
        if ((mask >> back) & 1) h = hash_step(h, (uint32)row[start + t - back]);
      int64 entry = ((int64)key * NUM_BUCKETS + h % NUM_BUCKETS) * WAYS;
      atomicMax(table + entry + hash_way(seq), seq);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) fields[COMMITTED] = start + num;
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

// Look one hash entry up and measure its match; quality 0 = no candidate.
__device__ int look_up(
    const Memory& m, const int* fields, const int* tail, int total, int way, int* seq_out) {
  *seq_out = -1;
  int mask = key_masks[way / WAYS];
  if (total < 32 - __clz(mask) || !(fields[FLAGS] & 1)) return 0;
  uint32 h = hash_start(fields[NAMESPACE], mask);
  for (int back = 0; mask >> back; back++)
    if ((mask >> back) & 1) h = hash_step(h, (uint32)tail[back]);
  int64 bucket = (int64)(way / WAYS) * NUM_BUCKETS + h % NUM_BUCKETS;
  int seq = m.table[bucket * WAYS + way % WAYS];
  int page = seq / PAGE, offset = seq % PAGE;
  if (seq < 0 || !is_live(m, page)) return 0;
  const int* info = page_info(m, page);
  if (offset >= info[PAGE_LEN] || info[PAGE_NAMESPACE] != fields[NAMESPACE]) return 0;
  if (info[PAGE_UID] == fields[UID]) return 0;
  if (m.counters[NEWEST_UID] - info[PAGE_UID] >= MAX_CACHED) return 0;
  *seq_out = seq;
  int run = 0, again = 0;
  bool unbroken = true;
  int length = min(WINDOW, total);
  if (offset + 1 >= WINDOW) {
    // The usual case, all in one page: loads that do not wait for each other.
    const int* end = m.tokens + (int64)(page % NUM_PAGES) * PAGE + offset;
    uint32 equal = 0;
#pragma unroll
    for (int back = 0; back < WINDOW; back++)
      equal |= (uint32)(back < length && end[-back] == tail[back]) << back;
    run = __ffs(~equal) - 1;
    again = __popc(equal) - run;
    return run > 0 ? run + again / MEMORY_GAP : 0;
  }
  for (int back = 0; back < length; back++) {
    if (offset < 0) {
      page = page_info(m, page)[PAGE_PREV];
      offset = PAGE - 1;
      if (!is_live(m, page)) break;
    }
    bool equal = token_at(m, page, offset) == tail[back];
    unbroken = unbroken && equal;
    if (unbroken)
      run++;
    else
      again += equal;
    offset--;
  }
  return run > 0 ? run + again / MEMORY_GAP : 0;
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
    int* pending_predicted, int* pending_bins, const int* accepted,
    const int* observed, int64* drafts, int* num_drafts, float* confidences) {
  __shared__ union {
    Found found;
    Votes votes;
  } u;
  __shared__ Candidates c;
  Memory m = {tokens, pages, table, counters};
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
  uint32 threshold = counters[THRESHOLD] >> 8;
  int num = 0, valid = 0;
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
        uint32 chance = ((uint32)accepted[bin] << 16) / (uint32)observed[bin];
        order = (int)(chance * 32 + lane);
      }
      int winner = __reduce_max_sync(0xffffffffu, order);
      int chosen = __shfl_sync(0xffffffffu, predicted, winner & 31);
      bool blocked = is_placeholder(placeholder_ids, num_placeholders, chosen);
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
    fields[DRAFT_LEN] = total;
    fields[DRAFT_NUM] = num;
    fields[DRAFT_VALID] = valid;
  }
}
