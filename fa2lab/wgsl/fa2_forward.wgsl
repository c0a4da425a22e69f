// FlashAttention-2 forward, one invocation a query row.
//
//   S = scale · Q Kᵀ     P = softmax(S) over the keys a row sees     O = P V     L = ln Σ exp(S)
//
// A row's softmax is built up tile by tile. With (m, l, O) for the keys so far and a tile of scores s:
//
//   m_new = max(m, max s)          the maximum so far
//   alpha = exp(m - m_new)         what the older sums shrink by, now that the maximum grew
//   l     = alpha · l + Σ exp(s - m_new)
//   O     = alpha · O + Σ exp(s - m_new) · v
//
// and at the end O / l is written, with L = m + ln l. Nothing of size Tq × Tk exists.
//
// A workgroup owns BLOCK_Q query rows (the paper's Br) of one batch and head, and walks the keys BLOCK_K at a time
// (Bc). Its tiles of Q, K and V stand in workgroup memory: (BLOCK_Q + 2·BLOCK_K) · HEAD_DIM · 4 bytes.
// An invocation owns one query row: its m, l and O live in private memory.
// Dispatch: x = ceil(Tq / BLOCK_Q), y = B·H.
//
// Constants: BLOCK_Q, BLOCK_K, HEAD_DIM; WRITE_ATTN runs the compatibility pass, WRITE_TRACE records each step.
// Snippets: problem.wgsl, tiles.wgsl.
// Source: Dao, "FlashAttention-2", arXiv:2307.08691, section 3.1, algorithm 1 and its causal tile skipping;
// the online softmax is Milakov and Gimelshein, arXiv:1805.02867, algorithm 3.

const_assert BLOCK_Q >= 1u && BLOCK_K >= 1u && HEAD_DIM >= 1u;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> q: array<f32>;                 // [B, Tq, H, D]
@group(0) @binding(2) var<storage, read> k: array<f32>;                 // [B, Tk, Hkv, D]
@group(0) @binding(3) var<storage, read> v: array<f32>;                 // [B, Tk, Hkv, D]
@group(0) @binding(4) var<storage, read_write> out: array<f32>;         // [B, Tq, H, D]
@group(0) @binding(5) var<storage, read_write> lse: array<f32>;         // [B, H, Tq]
@group(0) @binding(6) var<storage, read_write> attn: array<f32>;        // [B, H, Tq, Tk] if WRITE_ATTN
@group(0) @binding(7) var<storage, read_write> trace: array<vec4<f32>>; // [B, H, Tq, tiles] of (m, l, alpha, state)

var<workgroup> q_tile: array<f32, BLOCK_Q * HEAD_DIM>;
var<workgroup> k_tile: array<f32, BLOCK_K * HEAD_DIM>;
var<workgroup> v_tile: array<f32, BLOCK_K * HEAD_DIM>;

// The workgroup copies rows key0 .. key0+BLOCK_K-1 of K and V together, neighbours reading neighbours.
// Past the last key it stores zeros, which no row reads.
fn load_kv_tile(bh: u32, key0: u32, lane: u32) {
  for (var i = lane; i < BLOCK_K * HEAD_DIM; i += BLOCK_Q) {
    let key = key0 + i / HEAD_DIM;
    if (key < params.n_k) {
      let at = kv_start(bh, key) + i % HEAD_DIM;
      k_tile[i] = k[at];
      v_tile[i] = v[at];
    } else {
      k_tile[i] = 0.0;
      v_tile[i] = 0.0;
    }
  }
}

fn score(lane: u32, c: u32) -> f32 {
  var s = 0.0;
  for (var d = 0u; d < HEAD_DIM; d++) {
    s += q_tile[lane * HEAD_DIM + d] * k_tile[c * HEAD_DIM + d];
  }
  return s * params.scale;
}

@compute @workgroup_size(BLOCK_Q)
fn fa2_forward(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let workgroup = offset_id(id);
  let bh = workgroup.y;
  let row0 = workgroup.x * BLOCK_Q;
  let row = row0 + lane;
  let in_range = row < params.n_q;
  let seen = keys_seen(row);
  // The tile's last row sees the most; keys from here on are masked for all of its rows.
  let seen_by_tile = keys_seen(min(row0 + BLOCK_Q, params.n_q) - 1u);
  let n_tiles = ceil_div(params.n_k, BLOCK_K);

  for (var i = lane; i < BLOCK_Q * HEAD_DIM; i += BLOCK_Q) {
    let r = row0 + i / HEAD_DIM;
    if (r < params.n_q) {
      q_tile[i] = q[q_start(bh, r) + i % HEAD_DIM];
    } else {
      q_tile[i] = 0.0;
    }
  }

  var m = M_NONE;
  var l = 0.0;
  var o: array<f32, HEAD_DIM>;
  var s: array<f32, BLOCK_K>;

  var j = 0u;
  for (; j < n_tiles; j++) {
    let key0 = j * BLOCK_K;
    if (key0 >= seen_by_tile) {
      break;
    }
    workgroupBarrier(); // every row is done with the previous K and V tile before it is overwritten
    load_kv_tile(bh, key0, lane);
    workgroupBarrier(); // publishes the K and V tile (and, the first time, the Q tile)

    let n = min(max(seen, key0) - key0, BLOCK_K); // how many of the tile's keys this row sees
    var m_new = m;
    for (var c = 0u; c < n; c++) {
      s[c] = score(lane, c);
      m_new = max(m_new, s[c]);
    }
    let alpha = exp_shift(m - m_new);
    l *= alpha;
    for (var d = 0u; d < HEAD_DIM; d++) {
      o[d] *= alpha;
    }
    for (var c = 0u; c < n; c++) {
      let p = exp_shift(s[c] - m_new);
      l += p;
      for (var d = 0u; d < HEAD_DIM; d++) {
        o[d] += p * v_tile[c * HEAD_DIM + d];
      }
    }
    m = m_new;

    if (WRITE_TRACE && in_range) {
      trace[(bh * params.n_q + row) * n_tiles + j] = vec4<f32>(m, l, alpha, tile_state(row0, key0));
    }
  }

  if (in_range) {
    let at = q_start(bh, row);
    for (var d = 0u; d < HEAD_DIM; d++) {
      out[at + d] = select(o[d] / l, 0.0, seen == 0u);
    }
    lse[bh * params.n_q + row] = select(m + log_sum(l), params.neg_inf, seen == 0u);
    if (WRITE_TRACE) {
      for (; j < n_tiles; j++) {
        trace[(bh * params.n_q + row) * n_tiles + j] = vec4<f32>(m, l, 1.0, TILE_SKIPPED);
      }
    }
  }

  if (WRITE_ATTN) {
    write_attn(bh, row, lane, seen, m, l, ceil_div(seen_by_tile, BLOCK_K));
  }
}

// The compatibility pass, for backward kernels that read P: walk the K tiles once more and write exp(s - m) / l from
// the final m and l. It costs the score work again and B·H·Tq·Tk floats. What no row sees was zero before and stays.
fn write_attn(bh: u32, row: u32, lane: u32, seen: u32, m: f32, l: f32, n_tiles: u32) {
  for (var j = 0u; j < n_tiles; j++) {
    let key0 = j * BLOCK_K;
    workgroupBarrier(); // every row is done with the previous tile before it is overwritten
    load_kv_tile(bh, key0, lane);
    workgroupBarrier(); // publishes the K tile
    let n = min(max(seen, key0) - key0, BLOCK_K);
    for (var c = 0u; c < n; c++) {
      // No score passes the maximum; saying so keeps compilers from fusing the scale's product with this subtraction,
      // which would round it otherwise than the first walk did and cost a weight half an ULP of its score.
      attn[(bh * params.n_q + row) * params.n_k + key0 + c] = exp_shift(min(score(lane, c), m) - m) / l;
    }
  }
}
