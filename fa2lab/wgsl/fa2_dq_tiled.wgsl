// FlashAttention-2 backward with tiles in registers: the gradient of Q, with P recomputed tile by tile.
//
//   P_ij  = exp(S_ij - L_i)     dP_ij = dO_i · v_j     dS_ij = P_ij (dP_ij - delta_i)
//   dQ_i  = scale · Σ_j dS_ij k_j
//
// The walk is fa2_dq.wgsl's, the work is shared out as in fa2_forward_tiled.wgsl: three products a tile, dO Vᵀ, Q Kᵀ and
// dS K, of which the last two share K where D is one slice. S is added up in the forward's order, to the same bits.
//
// A workgroup owns BLOCK_Q query rows (Br) of one batch and head and walks the keys BLOCK_K (Bc) at a time.
// Workgroup memory: tiles of Q or dO (BLOCK_Q · D / SLICES), of K or V (BLOCK_K · D / SLICES), of dS (BLOCK_Q · BLOCK_K).
// Dispatch: x = ceil(Tq / BLOCK_Q), y = B·H.
//
// Constants: BLOCK_Q, BLOCK_K, HEAD_DIM, ROWS, ROW_LANES, SLICES; aliases Stored (of Q, K, V, dO), Element (of dQ).
// Snippets: problem.wgsl, register_tiles.wgsl, qkv_vec4 or qkv_scalar, dout_vec4 or dout_scalar.
// Source: Dao, FlashAttention-2, arXiv:2307.08691, algorithm 2.

const BLOCK_ROWS: u32 = BLOCK_Q;
const BLOCK_COLS: u32 = BLOCK_K;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> q: array<Stored>;         // [B, Tq, H, D]
@group(0) @binding(2) var<storage, read> k: array<Stored>;         // [B, Tk, Hkv, D]
@group(0) @binding(3) var<storage, read> v: array<Stored>;         // [B, Tk, Hkv, D]
@group(0) @binding(4) var<storage, read> dout: array<Stored>;      // [B, Tq, H, D]
@group(0) @binding(5) var<storage, read> lse: array<f32>;          // [B, H, Tq]
@group(0) @binding(6) var<storage, read> delta: array<f32>;        // [B, H, Tq]
@group(0) @binding(7) var<storage, read_write> dq: array<Element>; // [B, Tq, H, D]

// `start` is where row 0 of the head starts. Rows past the last query are zeros, and so are keys that no row of the tile sees, whatever K and V hold there.
fn load_dout_and_v(start_q: u32, start_kv: u32, row0: u32, key0: u32, end: u32, slice: u32, lane: u32) {
  for (var n = 0u; n < rolled(ROW_LOADS); n++) { // unroll
    let at = load_of(n, lane);
    var value = vec4<f32>();
    if (row0 + at.x < params.n_q && slice * SLICE + at.y < CHUNKS) {
      value = dout_vec4(start_q + (row0 + at.x) * params.n_heads * HEAD_DIM, slice * SLICE + at.y);
    }
    store_row(n, lane, value);
  }
  for (var n = 0u; n < rolled(COL_LOADS); n++) { // unroll
    let at = load_of(n, lane);
    var value = vec4<f32>();
    if (key0 + at.x < end && slice * SLICE + at.y < CHUNKS) {
      value = v_vec4(start_kv + (key0 + at.x) * params.n_kv_heads * HEAD_DIM, slice * SLICE + at.y);
    }
    store_col(n, lane, value);
  }
}

fn load_q(start: u32, row0: u32, slice: u32, lane: u32) {
  for (var n = 0u; n < rolled(ROW_LOADS); n++) { // unroll
    let at = load_of(n, lane);
    var value = vec4<f32>();
    if (row0 + at.x < params.n_q && slice * SLICE + at.y < CHUNKS) {
      value = q_vec4(start + (row0 + at.x) * params.n_heads * HEAD_DIM, slice * SLICE + at.y) * params.scale;
    }
    store_row(n, lane, value);
  }
}

fn load_k(start: u32, key0: u32, end: u32, slice: u32, lane: u32) {
  for (var n = 0u; n < rolled(COL_LOADS); n++) { // unroll
    let at = load_of(n, lane);
    var value = vec4<f32>();
    if (key0 + at.x < end && slice * SLICE + at.y < CHUNKS) {
      value = k_vec4(start + (key0 + at.x) * params.n_kv_heads * HEAD_DIM, slice * SLICE + at.y);
    }
    store_col(n, lane, value);
  }
}

@compute @workgroup_size(INVOCATIONS)
fn fa2_dq_tiled(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let workgroup = offset_id(id);
  let bh = workgroup.y;
  let group = lane / ROW_LANES;
  let x = lane % ROW_LANES;
  let row0 = (ceil_div(params.n_q, BLOCK_Q) - 1u - workgroup.x) * BLOCK_Q; // the longest walks first
  let end = keys_seen(min(row0 + BLOCK_Q, params.n_q) - 1u);               // the tile's last row sees the most

  let start_q = q_start(bh, 0u);
  let start_kv = kv_start(bh, 0u);

  var row_lse: array<f32, ROWS>;
  var row_delta: array<f32, ROWS>;
  for (var r = 0u; r < rolled(ROWS); r++) { // unroll
    let row = row0 + r * GROUPS + group;
    if (keys_seen(row) > 0u) {
      row_lse[r] = lse[bh * params.n_q + row];
      row_delta[r] = delta[bh * params.n_q + row];
    }
  }

  var sums: Results;
  for (var key0 = 0u; key0 < end; key0 += BLOCK_K) {
    var dp = Scores();
    for (var slice = 0u; slice < rolled(SLICES); slice++) { // unroll
      workgroupBarrier(); // the last products are done with their tiles
      load_dout_and_v(start_q, start_kv, row0, key0, end, slice, lane);
      workgroupBarrier(); // publishes the slices of dO and V
      multiply_over_d(&dp, group, x);
    }
    var s = Scores();
    for (var slice = 0u; slice < rolled(SLICES); slice++) { // unroll
      workgroupBarrier(); // the last product is done with its tiles
      load_q(start_q, row0, slice, lane);
      load_k(start_kv, key0, end, slice, lane);
      workgroupBarrier(); // publishes the slices of Q and K
      multiply_over_d(&s, group, x);
    }

    // Masks leave a prefix: a tile that its first row sees whole, all of its rows see whole.
    let partial = keys_seen(row0) < key0 + BLOCK_K || end < key0 + BLOCK_K;
    var seen: RowCounts; // of the tile's keys, by row
    for (var c = 0u; c < rolled(COLS); c++) { // unroll
      for (var r = 0u; r < rolled(ROWS); r++) { // unroll
        let p = exp_shift(s[r * COLS + c] - row_lse[r]);
        s[r * COLS + c] = p * (dp[r * COLS + c] - row_delta[r]);
      }
    }
    if (partial) {
      for (var r = 0u; r < rolled(ROWS); r++) { // unroll
        seen[r] = max(keys_seen(row0 + r * GROUPS + group), key0) - key0;
        for (var c = 0u; c < rolled(COLS); c++) { // unroll
          s[r * COLS + c] = select(0.0, s[r * COLS + c], column_of(c, x) < seen[r]);
        }
      }
    }
    store_weights(&s, group, x);

    for (var slice = 0u; slice < rolled(SLICES); slice++) { // unroll
      if (SLICES > 1u) {
        workgroupBarrier(); // the last product is done with its tile
        load_k(start_kv, key0, end, slice, lane);
      }
      workgroupBarrier(); // publishes dS (and the slice of K)
      var part: Part; // of dQ: this slice's columns
      for (var i = 0u; i < rolled(ROWS * VECS); i++) { // unroll
        part[i] = sums[slice * ROWS * VECS + i];
      }
      multiply_over_columns(&part, group, x);
      if (partial && !is_finite(part)) { // perhaps by a key that not every row sees
        for (var i = 0u; i < rolled(ROWS * VECS); i++) { // unroll
          part[i] = sums[slice * ROWS * VECS + i];
        }
        multiply_some_columns(&part, RowCounts(), seen, group, x);
      }
      for (var i = 0u; i < rolled(ROWS * VECS); i++) { // unroll
        sums[slice * ROWS * VECS + i] = part[i];
      }
    }
  }

  for (var r = 0u; r < rolled(ROWS); r++) { // unroll
    let row = row0 + r * GROUPS + group;
    if (row < params.n_q) {
      for (var slice = 0u; slice < rolled(SLICES); slice++) { // unroll
        for (var h = 0u; h < rolled(VECS); h++) { // unroll
          for (var i = 0u; i < rolled(4u); i++) { // unroll
            let chunk = h * ROW_LANES + x;
            let d = (slice * SLICE + chunk) * 4u + i;
            if (chunk < SLICE && d < HEAD_DIM) {
              dq[start_q + row * params.n_heads * HEAD_DIM + d] = Element(sums[(slice * ROWS + r) * VECS + h][i] * params.scale);
            }
          }
        }
      }
    }
  }
}
