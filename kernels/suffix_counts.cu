// Draft by the CPU reference's scoring; suffix_counts.py says what the results must be.
//
// Compiled after suffix.cu's text, whose memory layout it shares, with DEPTH,
// MAX_PLACES and MIN_PROB as further macros. One block a request and source.

#define COUNT_THREADS 512
#define COUNT_WARPS (COUNT_THREADS / 32)
#define COUNT_HASH 2048
#define COUNT_LOAD 1536

struct CountVotes {
  int token[COUNT_HASH];
  int count[COUNT_HASH];
  int newest[COUNT_HASH]; // place index counted from the end: higher is newer
};

// The token `ahead` places after a place, -1 = none. Own: place = index of the next
// token. Memory: place = seq of the last matched token.
__device__ int token_after(
    const Memory& m, const int* row, int total, bool own, int place, int ahead) {
  if (own) return place + ahead < total ? row[place + ahead] : -1;
  int page = place / PAGE, offset = place % PAGE + 1 + ahead;
  while (offset >= PAGE) {
    page = page_info(m, page)[PAGE_NEXT];
    if (!is_live(m, page)) return -1;
    offset -= PAGE;
  }
  return offset < page_info(m, page)[PAGE_LEN] ? token_at(m, page, offset) : -1;
}

__device__ int match_before(
    const Memory& m, const int* row, int total, bool own, int place, int depth) {
  int length = 0;
  if (own) {
    while (length < depth && place - 1 - length >= 0 &&
           row[place - 1 - length] == row[total - 1 - length])
      length++;
    return length;
  }
  int page = place / PAGE, offset = place % PAGE;
  while (length < depth) {
    if (offset < 0) {
      page = page_info(m, page)[PAGE_PREV];
      if (!is_live(m, page)) break;
      offset = PAGE - 1;
    }
    if (token_at(m, page, offset) != row[total - 1 - length]) break;
    length++;
    offset--;
  }
  return length;
}

__device__ bool is_seen(const Memory& m, const int* fields, int seq) {
  int page = seq / PAGE;
  if (seq < 0 || !is_live(m, page)) return false;
  const int* info = page_info(m, page);
  return seq % PAGE < info[PAGE_LEN] && info[PAGE_NAMESPACE] == fields[NAMESPACE] &&
         m.counters[NEWEST_UID] - info[PAGE_UID] < MAX_CACHED;
}

// Places in order, newest first, into `place` and `length`; returns how many.
__device__ int collect(
    const Memory& m, const int* fields, const int* row, int total, bool own, int depth,
    int* place, int* length, int* warps) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int next_page = m.counters[NEXT_PAGE];
  int newest = own ? total : next_page * PAGE - 1;
  int oldest = own ? 1 : max(0, next_page - NUM_PAGES) * PAGE;
  int count = 0;
  for (int begin = newest; begin >= oldest && count < MAX_PLACES;
       begin -= COUNT_THREADS) {
    int at = begin - (int)threadIdx.x;
    int matched = 0;
    if (at >= oldest && (own || is_seen(m, fields, at)))
      matched = match_before(m, row, total, own, at, depth);
    uint32 ballot = __ballot_sync(0xffffffffu, matched > 0);
    if (lane == 0) warps[warp] = __popc(ballot);
    __syncthreads();
    int before = 0, all = 0;
    for (int w = 0; w < COUNT_WARPS; w++) {
      if (w < warp) before += warps[w];
      all += warps[w];
    }
    int to = count + before + __popc(ballot & ((1u << lane) - 1));
    if (matched > 0 && to < MAX_PLACES) {
      place[to] = at;
      length[to] = matched;
    }
    count = min(count + all, MAX_PLACES);
    __syncthreads();
  }
  return count;
}

__device__ uint32 hash_token(int token) { return hash_step(0x5BD1E995u, (uint32)token); }

struct CountShared {
  CountVotes votes;
  unsigned long long warp_best[COUNT_WARPS];
  int warps[COUNT_WARPS];
  int distinct, longest;
  int lengths[64];
  int tokens[K], best_tokens[K];
  float chances[K], best_chances[K];
};

// Of equal counts the higher rank wins: the oldest of tokens seen once, else the one
// seen last. Its own inverse.
__device__ __forceinline__ uint32 tie_rank(int count, uint32 newest) {
  return count == 1 ? 0x7fffffffu - newest : newest;
}

// One round of votes over the places alive; returns (count, index) of the winner as
// count << 32 | rank, its token in *token_out. All threads call it.
__device__ unsigned long long vote(
    CountShared& s, const Memory& m, const int* row, int total, bool own,
    const int* place, const int* length, const int* stamp, int num, int p, int j,
    int* token_out) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int mark = p << 8 | j;
  for (uint32 parts = 1;; parts *= 2) {
    bool full = false;
    unsigned long long best = 0;
    int best_token = -1;
    for (uint32 part = 0; part < parts && !full; part++) {
      for (int e = threadIdx.x; e < COUNT_HASH; e += COUNT_THREADS) {
        s.votes.token[e] = -1;
        s.votes.count[e] = 0;
        s.votes.newest[e] = 0;
      }
      if (threadIdx.x == 0) s.distinct = 0;
      __syncthreads();
      for (int i = threadIdx.x; i < num; i += COUNT_THREADS) {
        if (length[i] < p || (j > 0 && stamp[i] != mark)) continue;
        int token = token_after(m, row, total, own, place[i], j);
        if (token < 0) continue;
        uint32 h = hash_token(token);
        if ((h >> 11) % parts != part) continue;
        int at = h % COUNT_HASH;
        while (true) {
          // Too many tokens for the table: every thread stops, more parts follow.
          if (*(volatile int*)&s.distinct > COUNT_LOAD) break;
          int was = atomicCAS(&s.votes.token[at], -1, token);
          if (was == -1) atomicAdd(&s.distinct, 1);
          if (was == -1 || was == token) {
            atomicAdd(&s.votes.count[at], 1);
            atomicMax(&s.votes.newest[at], num - i);
            break;
          }
          at = (at + 1) % COUNT_HASH;
        }
      }
      __syncthreads();
      full = s.distinct > COUNT_LOAD;
      unsigned long long mine = 0;
      if (!full) {
        for (int e = threadIdx.x; e < COUNT_HASH; e += COUNT_THREADS) {
          int count = s.votes.count[e];
          unsigned long long key = (unsigned long long)count << 32 |
                                   tie_rank(count, (uint32)s.votes.newest[e]);
          mine = max(mine, count ? key : 0ull);
        }
        for (int d = 16; d > 0; d /= 2)
          mine = max(mine, __shfl_xor_sync(0xffffffffu, mine, d));
        if (lane == 0) s.warp_best[warp] = mine;
      }
      __syncthreads();
      if (!full) {
        for (int w = 0; w < COUNT_WARPS; w++) best = max(best, s.warp_best[w]);
      }
      __syncthreads();
    }
    if (full) continue;
    if (best > 0) {
      int i = num - (int)tie_rank((int)(best >> 32), (uint32)best);
      best_token = token_after(m, row, total, own, place[i], j);
    }
    *token_out = best_token;
    return best;
  }
}

extern "C" __global__ void __launch_bounds__(COUNT_THREADS) suffix_count(
    const int* token_ids, int64 token_ids_stride, const int64* idx_mapping,
    const int* total_len, const int* num_sampled, const int* limits, int num_steps,
    int* tokens, int* pages, int* counters, const int* slots, int* places, int* lengths,
    int* stamps, float* scores, int* found_tokens, float* found_chances, int* found) {
  __shared__ CountShared s;
  Memory m = {tokens, pages, 0, counters, 0};
  int64 batch_idx = blockIdx.x / 2;
  bool own = blockIdx.x % 2 == 0;
  int64 slot = idx_mapping[batch_idx];
  const int* fields = slots + slot * SLOT_FIELDS;
  const int* row = token_ids + slot * token_ids_stride;
  int total = total_len[slot];
  int room = min(min(K, num_steps), MAX_MODEL_LEN - total - 1);
  if (threadIdx.x == 0) {
    scores[blockIdx.x] = 0.0f;
    found[blockIdx.x] = 0;
  }
  if (num_sampled[batch_idx] <= 0 || total < 2 || room <= 0) return;
  if (!own && !(fields[FLAGS] & 1)) return;
  int depth = min(DEPTH, total) - 1;
  int* place = places + (int64)blockIdx.x * MAX_PLACES;
  int* length = lengths + (int64)blockIdx.x * MAX_PLACES;
  int* stamp = stamps + (int64)blockIdx.x * MAX_PLACES;
  if (threadIdx.x < 64) s.lengths[threadIdx.x] = 0;
  int num = collect(m, fields, row, total, own, depth, place, length, s.warps);
  __syncthreads();
  for (int i = threadIdx.x; i < num; i += COUNT_THREADS) {
    atomicAdd(&s.lengths[length[i]], 1);
    stamp[i] = -1;
  }
  __syncthreads();

  float best_score = 0.0f;
  int best_num = 0;
  int at_least = 0;
  for (int p = depth; p >= 1; p--) {
    at_least += s.lengths[p];
    int limit = min(limits[p], room);
    // No draft can score more than its length; equal scores go to the longer match.
    if (at_least == 0 || (float)limit <= best_score) continue;
    float all = 1.0f, score = 0.0f;
    int alive = at_least;
    int drafted = 0;
    for (int j = 0; j < limit; j++) {
      int token;
      unsigned long long top = vote(
          s, m, row, total, own, place, length, stamp, num, p, j, &token);
      if (top == 0) break;
      int count = (int)(top >> 32);
      float chance = __fdiv_rn((float)count, (float)alive);
      all = __fmul_rn(all, chance);
      if (all < (float)MIN_PROB) break;
      score = __fadd_rn(score, all);
      if (threadIdx.x == 0) {
        s.tokens[j] = token;
        s.chances[j] = chance;
      }
      for (int i = threadIdx.x; i < num; i += COUNT_THREADS) {
        if (length[i] < p || (j > 0 && stamp[i] != (p << 8 | j))) continue;
        if (token_after(m, row, total, own, place[i], j) == token)
          stamp[i] = p << 8 | (j + 1);
      }
      alive = count;
      drafted = j + 1;
    }
    __syncthreads();
    if (score > best_score) {
      best_score = score;
      best_num = drafted;
      if (threadIdx.x < drafted) {
        s.best_tokens[threadIdx.x] = s.tokens[threadIdx.x];
        s.best_chances[threadIdx.x] = s.chances[threadIdx.x];
      }
    }
    __syncthreads();
  }
  if (threadIdx.x < best_num) {
    found_tokens[(int64)blockIdx.x * K + threadIdx.x] = s.best_tokens[threadIdx.x];
    found_chances[(int64)blockIdx.x * K + threadIdx.x] = s.best_chances[threadIdx.x];
  }
  if (threadIdx.x == 0) {
    scores[blockIdx.x] = best_score;
    found[blockIdx.x] = best_num;
  }
}

// Choose between the own row and the memory; one warp a request.
extern "C" __global__ void suffix_choose(
    const int* token_ids, int64 token_ids_stride, const int64* idx_mapping,
    const int* total_len, int num_reqs, const float* scores, const int* found_tokens,
    const float* found_chances, const int* found, int* sources, int64* drafts,
    int* num_drafts, float* confidences) {
  int64 batch_idx = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (batch_idx >= num_reqs) return;
  int64 slot = idx_mapping[batch_idx];
  int64 from = batch_idx * 2;
  int source = scores[from + 1] > scores[from] ? MEMORY : OWN;
  from += source;
  int num = found[from];
  int last = token_ids[slot * token_ids_stride + max(0, total_len[slot] - 1)];
  for (int j = threadIdx.x % 32; j < K; j += 32) {
    drafts[batch_idx * K + j] = j < num ? found_tokens[from * K + j] : last;
    confidences[batch_idx * K + j] = j < num ? found_chances[from * K + j] : 0.0f;
  }
  if (threadIdx.x % 32 == 0) {
    num_drafts[slot] = num;
    sources[slot] = source;
  }
}
