// FlashAttention-2 backward with tiles in registers: the gradients of K and V, with P recomputed tile by tile.
//
//   P_ij  = exp(S_ij - L_i)     dP_ij = dO_i · v_j     dS_ij = P_ij (dP_ij - delta_i)
//   dV_j  = Σ_i P_ij dO_i
//   dK_j  = scale · Σ_i dS_ij q_i
//
// The walk is fa2_dkv.wgsl's, the work is shared out as in fa2_forward_tiled.wgsl with keys for rows and queries for
// columns: four products a tile, K Qᵀ, V dOᵀ, Pᵀ dO and dSᵀ Q. The scale stands in Q's tile, once for S and once for dK.
//
// A workgroup owns BLOCK_K keys (Bc) of one batch and KV head and walks the queries BLOCK_Q (Br) at a time, beginning
// with the first tile that sees any of its keys, for all query heads that read this KV head.
// Workgroup memory: tiles of K or V (BLOCK_K · D / SLICES), of Q or dO (BLOCK_Q · D / SLICES), of P or dS
// (BLOCK_K · BLOCK_Q). Dispatch: x = ceil(Tk / BLOCK_K), y = B·Hkv.
//
// Constants: BLOCK_Q, BLOCK_K, HEAD_DIM, ROWS, ROW_LANES, SLICES; aliases Stored (of Q, K, V, dO), Element (of dK, dV).
// Snippets: problem.wgsl, rows.wgsl, register_tiles.wgsl, qkv_vec4 or qkv_scalar, dout_vec4 or dout_scalar.
// Source: Dao, FlashAttention-2, arXiv:2307.08691, algorithm 2.

const BLOCK_ROWS: u32 = BLOCK_K;
const BLOCK_COLS: u32 = BLOCK_Q;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> q: array<Stored>;         // [B, Tq, H, D]
@group(0) @binding(2) var<storage, read> k: array<Stored>;         // [B, Tk, Hkv, D]
@group(0) @binding(3) var<storage, read> v: array<Stored>;         // [B, Tk, Hkv, D]
@group(0) @binding(4) var<storage, read> dout: array<Stored>;      // [B, Tq, H, D]
@group(0) @binding(5) var<storage, read> lse: array<f32>;          // [B, H, Tq]
@group(0) @binding(6) var<storage, read> delta: array<f32>;        // [B, H, Tq]
@group(0) @binding(7) var<storage, read_write> dk: array<Element>; // [B, Tk, Hkv, D]
@group(0) @binding(8) var<storage, read_write> dv: array<Element>; // [B, Tk, Hkv, D]

// Keys past the last one are zeros, which nothing reads. `start` is where row 0 of the head starts.
fn load_k(start: u32, key0: u32, slice: u32, lane: u32) {
  for (var n = 0u; n < rolled(ROW_LOADS); n++) { // unroll
    let at = load_of(n, lane);
    var value = vec4<f32>();
    if (key0 + at.x < params.n_k && slice * SLICE + at.y < CHUNKS) {
      value = k_vec4(start + (key0 + at.x) * params.n_kv_heads * HEAD_DIM, slice * SLICE + at.y);
    }
    store_row(n, lane, value);
  }
}

fn load_v(start: u32, key0: u32, slice: u32, lane: u32) {
  for (var n = 0u; n < rolled(ROW_LOADS); n++) { // unroll
    let at = load_of(n, lane);
    var value = vec4<f32>();
    if (key0 + at.x < params.n_k && slice * SLICE + at.y < CHUNKS) {
      value = v_vec4(start + (key0 + at.x) * params.n_kv_heads * HEAD_DIM, slice * SLICE + at.y);
    }
    store_row(n, lane, value);
  }
}

// Queries past the last one are zeros.
fn load_q(start: u32, row0: u32, slice: u32, lane: u32) {
  for (var n = 0u; n < rolled(COL_LOADS); n++) { // unroll
    let at = load_of(n, lane);
    var value = vec4<f32>();
    if (row0 + at.x < params.n_q && slice * SLICE + at.y < CHUNKS) {
      value = q_vec4(start + (row0 + at.x) * params.n_heads * HEAD_DIM, slice * SLICE + at.y) * params.scale;
    }
    store_col(n, lane, value);
  }
}

fn load_dout(start: u32, row0: u32, slice: u32, lane: u32) {
  for (var n = 0u; n < rolled(COL_LOADS); n++) { // unroll
    let at = load_of(n, lane);
    var value = vec4<f32>();
    if (row0 + at.x < params.n_q && slice * SLICE + at.y < CHUNKS) {
      value = dout_vec4(start + (row0 + at.x) * params.n_heads * HEAD_DIM, slice * SLICE + at.y);
    }
    store_col(n, lane, value);
  }
}

// sums[slice] += weights · columns. Where a key is not seen by all of the tile's queries, those before `first` are left
// out, for what they hold may not be finite.
fn add_queries(sums: ptr<function, Part>, partial: bool, first: RowCounts, last: RowCounts, group: u32, x: u32) {
  let before = *sums;
  multiply_over_columns(sums, group, x);
  if (partial && !is_finite(*sums)) {
    *sums = before;
    multiply_some_columns(sums, first, last, group, x);
  }
}

@compute @workgroup_size(INVOCATIONS)
fn fa2_dkv_tiled(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let workgroup = offset_id(id);
  let heads = params.n_heads / params.n_kv_heads;
  let batch = workgroup.y / params.n_kv_heads;
  let first_bh = batch * params.n_heads + (workgroup.y % params.n_kv_heads) * heads;
  let group = lane / ROW_LANES;
  let x = lane % ROW_LANES;
  let key0 = workgroup.x * BLOCK_K; // the first keys are seen by the most rows: the longest walks first
  let first_tile = first_row(key0) / BLOCK_Q; // rows before it see none of this workgroup's keys

  let start_kv = kv_start(first_bh, 0u);

  var dk_sums: Results;
  var dv_sums: Results;
  for (var bh = first_bh; bh < first_bh + heads; bh++) {
    let start_q = q_start(bh, 0u);
    for (var row0 = first_tile * BLOCK_Q; row0 < params.n_q; row0 += BLOCK_Q) {
      var p = Scores();
      for (var slice = 0u; slice < rolled(SLICES); slice++) { // unroll
        workgroupBarrier(); // the last products are done with their tiles
        load_k(start_kv, key0, slice, lane);
        load_q(start_q, row0, slice, lane);
        workgroupBarrier(); // publishes the slices of K and Q
        multiply_over_d(&p, group, x);
      }
      var ds = Scores();
      for (var slice = 0u; slice < rolled(SLICES); slice++) { // unroll
        workgroupBarrier(); // the last product is done with its tiles
        load_v(start_kv, key0, slice, lane);
        load_dout(start_q, row0, slice, lane);
        workgroupBarrier(); // publishes the slices of V and dO
        multiply_over_d(&ds, group, x);
      }

      // A tile is whole if its first row sees its last key, and all of its rows exist.
      let partial = keys_seen(row0) < key0 + BLOCK_K || params.n_q < row0 + BLOCK_Q;
      for (var c = 0u; c < rolled(COLS); c++) { // unroll
        let row = row0 + column_of(c, x);
        let seen = keys_seen(row);
        var row_lse = 0.0;
        var row_delta = 0.0;
        if (seen > 0u) {
          row_lse = lse[bh * params.n_q + row];
          row_delta = delta[bh * params.n_q + row];
        }
        for (var r = 0u; r < rolled(ROWS); r++) { // unroll
          let visible = !partial || key0 + r * GROUPS + group < seen;
          p[r * COLS + c] = select(0.0, exp_shift(p[r * COLS + c] - row_lse), visible);
          ds[r * COLS + c] = select(0.0, p[r * COLS + c] * (ds[r * COLS + c] - row_delta), visible);
        }
      }
      var first: RowCounts; // of the tile's queries, those that see a key, by key
      var last: RowCounts;
      for (var r = 0u; r < rolled(ROWS); r++) { // unroll
        first[r] = max(first_row(key0 + r * GROUPS + group), row0) - row0;
        last[r] = params.n_q - row0;
      }

      for (var slice = 0u; slice < rolled(SLICES); slice++) { // unroll
        if (slice == 0u) {
          store_weights(&p, group, x);
        }
        if (SLICES > 1u) {
          workgroupBarrier(); // the last product is done with its tile
          load_dout(start_q, row0, slice, lane);
        }
        workgroupBarrier(); // publishes P (and the slice of dO)
        var part: Part; // of dV: this slice's columns
        for (var i = 0u; i < rolled(ROWS * VECS); i++) { // unroll
          part[i] = dv_sums[slice * ROWS * VECS + i];
        }
        add_queries(&part, partial, first, last, group, x);
        for (var i = 0u; i < rolled(ROWS * VECS); i++) { // unroll
          dv_sums[slice * ROWS * VECS + i] = part[i];
        }
      }
      for (var slice = 0u; slice < rolled(SLICES); slice++) { // unroll
        workgroupBarrier(); // the last product is done with its tiles
        if (slice == 0u) {
          store_weights(&ds, group, x);
        }
        load_q(start_q, row0, slice, lane);
        workgroupBarrier(); // publishes dS and the slice of Q
        var part: Part; // of dK
        for (var i = 0u; i < rolled(ROWS * VECS); i++) { // unroll
          part[i] = dk_sums[slice * ROWS * VECS + i];
        }
        add_queries(&part, partial, first, last, group, x);
        for (var i = 0u; i < rolled(ROWS * VECS); i++) { // unroll
          dk_sums[slice * ROWS * VECS + i] = part[i];
        }
      }
    }
  }

  for (var r = 0u; r < rolled(ROWS); r++) { // unroll
    let key = key0 + r * GROUPS + group;
    if (key < params.n_k) {
      for (var slice = 0u; slice < rolled(SLICES); slice++) { // unroll
        for (var h = 0u; h < rolled(VECS); h++) { // unroll
          for (var i = 0u; i < rolled(4u); i++) { // unroll
            let chunk = h * ROW_LANES + x;
            let d = (slice * SLICE + chunk) * 4u + i;
            if (chunk < SLICE && d < HEAD_DIM) {
              let at = start_kv + key * params.n_kv_heads * HEAD_DIM + d;
              dk[at] = Element(dk_sums[(slice * ROWS + r) * VECS + h][i]);
              dv[at] = Element(dv_sums[(slice * ROWS + r) * VECS + h][i]);
            }
          }
        }
      }
    }
  }
}
