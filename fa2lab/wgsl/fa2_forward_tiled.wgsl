// FlashAttention-2 forward, tiles in registers: an invocation owns ROWS rows by COLS keys of the scores.
//
//   S = scale · Q Kᵀ     P = softmax(S) over the keys a row sees     O = P V     L = ln Σ exp(S)
//
// The recurrence is fa2_forward.wgsl's. With (m, l, O) for the keys so far and a tile of scores s:
//
//   m_new = max(m, max s)     alpha = exp(m - m_new)     l = alpha · l + Σ exp(s - m_new)
//   O = alpha · O + Σ exp(s - m_new) · v                 and at the end O / l, and L = m + ln l
//
// What is new: many invocations share a row. Its maximum is agreed on in every tile; its sum l is kept in parts, one a
// lane, and added up once at the end. P passes through workgroup memory from the lanes that own keys to those that
// own columns of O. K and V take turns in one tile, and with PREFETCH the next one travels while the last is worked on.
//
// A workgroup owns BLOCK_Q query rows (Br) of one batch and head, and walks the keys BLOCK_K (Bc) at a time: all of
// them, or with SPLIT_KEYS the part of them that its z says, for a second kernel to merge. The longest walks of a
// causal problem start first. Dispatch: x = ceil(Tq / BLOCK_Q), y = B·H, z = parts.
// Workgroup memory: tiles of Q (BLOCK_Q · D / SLICES), of K or V (BLOCK_K · D / SLICES) and of P (BLOCK_Q · BLOCK_K).
//
// Constants: BLOCK_Q, BLOCK_K, HEAD_DIM, ROWS, ROW_LANES, SLICES, PREFETCH, SPLIT_KEYS; WRITE_ATTN runs the
// compatibility pass, WRITE_TRACE records each step; aliases Stored (of Q, K and V) and Element (of O).
// Snippets: problem.wgsl, tiles.wgsl, register_tiles.wgsl, qkv_vec4 or qkv_scalar, row_subgroup or
// row_workgroup.
// Source: Dao, FlashAttention-2, arXiv:2307.08691, algorithm 1 and section 3.3.

const BLOCK_ROWS: u32 = BLOCK_Q;
const BLOCK_COLS: u32 = BLOCK_K;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> q: array<Stored>;              // [B, Tq, H, D]
@group(0) @binding(2) var<storage, read> k: array<Stored>;              // [B, Tk, Hkv, D]
@group(0) @binding(3) var<storage, read> v: array<Stored>;              // [B, Tk, Hkv, D]
@group(0) @binding(4) var<storage, read_write> out: array<Element>;     // [parts, B, Tq, H, D]
@group(0) @binding(5) var<storage, read_write> lse: array<f32>;         // [parts, B, H, Tq]
@group(0) @binding(6) var<storage, read_write> attn: array<f32>;        // [B, H, Tq, Tk] if WRITE_ATTN
@group(0) @binding(7) var<storage, read_write> trace: array<vec4<f32>>; // [B, H, Tq, tiles] of (m, l, alpha, state)

// What this invocation carries from memory to the column tile.
var<private> carried: array<vec4<f32>, COL_LOADS>;

// Rows past the last query are zeros, which nothing reads. `start` is where the head's row 0 starts.
fn load_q_slice(start: u32, row0: u32, slice: u32, lane: u32) {
  for (var n = 0u; n < rolled(ROW_LOADS); n++) { // unroll
    let at = load_of(n, lane);
    var value = vec4<f32>();
    if (row0 + at.x < params.n_q && slice * SLICE + at.y < CHUNKS) {
      value = q_vec4(start + (row0 + at.x) * params.n_heads * HEAD_DIM, slice * SLICE + at.y) * params.scale;
    }
    store_row(n, lane, value);
  }
}

// Past the keys that this tile may see stand zeros, whatever K and V hold there.
fn fetch_k(start: u32, key0: u32, end: u32, slice: u32, lane: u32) {
  for (var n = 0u; n < rolled(COL_LOADS); n++) { // unroll
    let at = load_of(n, lane);
    carried[n] = vec4<f32>();
    if (key0 + at.x < end && slice * SLICE + at.y < CHUNKS) {
      carried[n] = k_vec4(start + (key0 + at.x) * params.n_kv_heads * HEAD_DIM, slice * SLICE + at.y);
    }
  }
}

fn fetch_v(start: u32, key0: u32, end: u32, slice: u32, lane: u32) {
  for (var n = 0u; n < rolled(COL_LOADS); n++) { // unroll
    let at = load_of(n, lane);
    carried[n] = vec4<f32>();
    if (key0 + at.x < end && slice * SLICE + at.y < CHUNKS) {
      carried[n] = v_vec4(start + (key0 + at.x) * params.n_kv_heads * HEAD_DIM, slice * SLICE + at.y);
    }
  }
}

// s = Q Kᵀ of one tile, scale included. With PREFETCH K's first slice is carried already, and at the end V's is.
fn score_tile(
  s: ptr<function, Scores>, start_q: u32, start_kv: u32, row0: u32, key0: u32, end: u32, lane: u32
) {
  let group = lane / ROW_LANES;
  let x = lane % ROW_LANES;
  *s = Scores();
  for (var slice = 0u; slice < rolled(SLICES); slice++) { // unroll
    workgroupBarrier(); // the last products are done with their tiles
    if (!PREFETCH) {
      fetch_k(start_kv, key0, end, slice, lane);
    }
    for (var n = 0u; n < rolled(COL_LOADS); n++) { // unroll
      store_col(n, lane, carried[n]);
    }
    if (SLICES > 1u) {
      load_q_slice(start_q, row0, slice, lane);
    }
    if (PREFETCH && slice + 1u < SLICES) {
      fetch_k(start_kv, key0, end, slice + 1u, lane);
    } else if (PREFETCH) {
      fetch_v(start_kv, key0, end, 0u, lane);
    }
    workgroupBarrier(); // publishes the slice of K (and of Q; the first time, all of Q)
    multiply_over_d(s, group, x);
  }
}

@compute @workgroup_size(INVOCATIONS)
fn fa2_forward_tiled(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let workgroup = offset_id(id);
  let bh = workgroup.y;
  let group = lane / ROW_LANES;
  let x = lane % ROW_LANES;
  let row0 = (ceil_div(params.n_q, BLOCK_Q) - 1u - workgroup.x) * BLOCK_Q;
  let n_tiles = ceil_div(params.n_k, BLOCK_K);
  // The tile's last row sees the most; keys from here on are masked for all of its rows.
  let seen_by_tile = keys_seen(min(row0 + BLOCK_Q, params.n_q) - 1u);
  let begin = workgroup.z * SPLIT_KEYS;
  let end = min(seen_by_tile, begin + SPLIT_KEYS);
  let start_q = q_start(bh, 0u);
  let start_kv = kv_start(bh, 0u);

  if (SLICES == 1u) {
    load_q_slice(start_q, row0, 0u, lane);
  }

  var m: RowValues;
  for (var r = 0u; r < rolled(ROWS); r++) { // unroll
    m[r] = M_NONE;
  }
  var l: RowValues; // of this lane's keys
  var o = Results();
  var s: Scores;

  if (PREFETCH && begin < end) {
    fetch_k(start_kv, begin, end, 0u, lane);
  }
  for (var key0 = begin; key0 < end; key0 += BLOCK_K) {
    score_tile(&s, start_q, start_kv, row0, key0, end, lane);

    // Masks leave a prefix: a tile that its first row sees whole, all of its rows see whole.
    let partial = keys_seen(row0) < key0 + BLOCK_K || end < key0 + BLOCK_K;
    var seen: RowCounts; // of the tile's keys, by row
    if (partial) {
      for (var r = 0u; r < rolled(ROWS); r++) { // unroll
        seen[r] = max(min(keys_seen(row0 + r * GROUPS + group), end), key0) - key0;
      }
      for (var c = 0u; c < rolled(COLS); c++) { // unroll
        for (var r = 0u; r < rolled(ROWS); r++) { // unroll
          s[r * COLS + c] = select(M_NONE, s[r * COLS + c], column_of(c, x) < seen[r]);
        }
      }
    }
    var m_new: RowValues = m;
    for (var c = 0u; c < rolled(COLS); c++) { // unroll
      for (var r = 0u; r < rolled(ROWS); r++) { // unroll
        m_new[r] = max(m_new[r], s[r * COLS + c]);
      }
    }
    row_max(&m_new, group, x);
    var alpha: array<f32, ROWS>;
    for (var r = 0u; r < rolled(ROWS); r++) { // unroll
      alpha[r] = exp_shift(m[r] - m_new[r]);
      l[r] *= alpha[r];
      m[r] = m_new[r];
      for (var slice = 0u; slice < rolled(SLICES); slice++) { // unroll
        for (var h = 0u; h < rolled(VECS); h++) { // unroll
          o[(slice * ROWS + r) * VECS + h] *= alpha[r];
        }
      }
    }
    for (var c = 0u; c < rolled(COLS); c++) { // unroll
      for (var r = 0u; r < rolled(ROWS); r++) { // unroll
        s[r * COLS + c] = exp_shift(s[r * COLS + c] - m[r]);
      }
    }
    if (partial) { // in a row that has seen no key yet m is M_NONE, and what is masked is exp(0)
      for (var c = 0u; c < rolled(COLS); c++) { // unroll
        for (var r = 0u; r < rolled(ROWS); r++) { // unroll
          s[r * COLS + c] = select(0.0, s[r * COLS + c], column_of(c, x) < seen[r]);
        }
      }
    }
    for (var c = 0u; c < rolled(COLS); c++) { // unroll
      for (var r = 0u; r < rolled(ROWS); r++) { // unroll
        l[r] += s[r * COLS + c];
      }
    }

    for (var slice = 0u; slice < rolled(SLICES); slice++) { // unroll
      workgroupBarrier(); // the last products are done with their tiles
      if (!PREFETCH) {
        fetch_v(start_kv, key0, end, slice, lane);
      }
      for (var n = 0u; n < rolled(COL_LOADS); n++) { // unroll
        store_col(n, lane, carried[n]);
      }
      if (slice == 0u) {
        store_weights(&s, group, x);
      }
      if (PREFETCH && slice + 1u < SLICES) {
        fetch_v(start_kv, key0, end, slice + 1u, lane);
      } else if (PREFETCH && key0 + BLOCK_K < end) {
        fetch_k(start_kv, key0 + BLOCK_K, end, 0u, lane);
      }
      workgroupBarrier(); // publishes P and the slice of V
      var part: Part; // of O: this slice's columns
      for (var i = 0u; i < rolled(ROWS * VECS); i++) { // unroll
        part[i] = o[slice * ROWS * VECS + i];
      }
      multiply_over_columns(&part, group, x);
      if (partial && !is_finite(part)) { // 0 · NaN is NaN: what a row does not see must not be multiplied at all
        for (var i = 0u; i < rolled(ROWS * VECS); i++) { // unroll
          part[i] = o[slice * ROWS * VECS + i];
        }
        multiply_some_columns(&part, RowCounts(), seen, group, x);
      }
      for (var i = 0u; i < rolled(ROWS * VECS); i++) { // unroll
        o[slice * ROWS * VECS + i] = part[i];
      }
    }

    if (WRITE_TRACE) {
      var l_row = l;
      row_sum(&l_row, group, x);
      for (var r = 0u; r < rolled(ROWS); r++) { // unroll
        let row = row0 + r * GROUPS + group;
        if (x == 0u && row < params.n_q) {
          let at = (bh * params.n_q + row) * n_tiles + key0 / BLOCK_K;
          trace[at] = vec4<f32>(m[r], l_row[r], alpha[r], tile_state(row0, key0));
        }
      }
    }
  }

  row_sum(&l, group, x);
  for (var r = 0u; r < rolled(ROWS); r++) { // unroll
    let row = row0 + r * GROUPS + group;
    if (row < params.n_q) {
      let at = workgroup.z * params.n_batch * params.n_heads * params.n_q;
      let none = keys_seen(row) <= begin;
      for (var slice = 0u; slice < rolled(SLICES); slice++) { // unroll
        for (var h = 0u; h < rolled(VECS); h++) { // unroll
          let o_vec = o[(slice * ROWS + r) * VECS + h] / l[r];
          let chunk = h * ROW_LANES + x;
          for (var i = 0u; i < rolled(4u); i++) { // unroll
            let d = (slice * SLICE + chunk) * 4u + i;
            if (chunk < SLICE && d < HEAD_DIM) {
              out[at * HEAD_DIM + start_q + row * params.n_heads * HEAD_DIM + d] = Element(select(o_vec[i], 0.0, none));
            }
          }
        }
      }
      if (x == 0u) {
        lse[at + bh * params.n_q + row] = select(m[r] + log_sum(l[r]), params.neg_inf, none);
        if (WRITE_TRACE) {
          for (var j = ceil_div(end, BLOCK_K); j < n_tiles; j++) {
            trace[(bh * params.n_q + row) * n_tiles + j] = vec4<f32>(m[r], l[r], 1.0, TILE_SKIPPED);
          }
        }
      }
    }
  }

  if (WRITE_ATTN) {
    // The compatibility pass, for backward kernels that read P: the scores once more, and exp(s - m) / l from the
    // final m and l. What no row sees was zero before and stays.
    if (PREFETCH && begin < end) {
      fetch_k(start_kv, begin, end, 0u, lane);
    }
    for (var key0 = begin; key0 < end; key0 += BLOCK_K) {
      score_tile(&s, start_q, start_kv, row0, key0, end, lane);
      if (PREFETCH) {
        fetch_k(start_kv, key0 + BLOCK_K, end, 0u, lane);
      }
      for (var c = 0u; c < rolled(COLS); c++) { // unroll
        let key = key0 + column_of(c, x);
        for (var r = 0u; r < rolled(ROWS); r++) { // unroll
          let row = row0 + r * GROUPS + group;
          if (key < keys_seen(row)) {
            let at = (bh * params.n_q + row) * params.n_k + key;
            attn[at] = exp_shift(s[r * COLS + c] - m[r]) / l[r];
          }
        }
      }
    }
  }
}
