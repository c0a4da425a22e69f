// FlashAttention-2 backward of one head, with what fa2_dq and fa2_dkv compute on the way written out.
//
//   P_ij = exp(S_ij - L_i)     dS_ij = P_ij (dO_i · v_j - delta_i)
//   a tile adds   scale · dS K   to dQ,   scale · dSᵀ Q   to dK,   Pᵀ dO   to dV
//
// A workgroup owns one tile: BLOCK_Q queries by BLOCK_K keys. An invocation first owns one of its query rows, then one
// of its keys. Masked pairs are written as 0. For looking at, not for speed: q, k, v and dO are read where they stand.
// Workgroup memory: 2 · BLOCK_Q · BLOCK_K · 4 bytes. Dispatch: x = ceil(Tq / BLOCK_Q), y = ceil(Tk / BLOCK_K).
//
// Constants: BLOCK_Q, BLOCK_K, HEAD_DIM, TILE_LANES = max(BLOCK_Q, BLOCK_K). Snippets: problem.wgsl, rows.wgsl.
// The problem has B = H = Hkv = 1.
// Source: Dao, FlashAttention-2, arXiv:2307.08691, algorithm 2.

const_assert TILE_LANES >= BLOCK_Q && TILE_LANES >= BLOCK_K;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> q: array<f32>;                // [Tq, D]
@group(0) @binding(2) var<storage, read> k: array<f32>;                // [Tk, D]
@group(0) @binding(3) var<storage, read> v: array<f32>;                // [Tk, D]
@group(0) @binding(4) var<storage, read> dout: array<f32>;             // [Tq, D]
@group(0) @binding(5) var<storage, read> lse: array<f32>;              // [Tq]
@group(0) @binding(6) var<storage, read> delta: array<f32>;            // [Tq]
@group(0) @binding(7) var<storage, read_write> p_ds: array<vec2<f32>>; // [Tq, Tk] of (P, dS)
// [K tiles, Tq, D] for dQ, then [query tiles, Tk, D] for dK, then the same for dV
@group(0) @binding(8) var<storage, read_write> parts: array<f32>;

var<workgroup> p_tile: array<f32, BLOCK_Q * BLOCK_K>;
var<workgroup> ds_tile: array<f32, BLOCK_Q * BLOCK_K>;

@compute @workgroup_size(TILE_LANES)
fn fa2_backward_trace(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let tile = offset_id(id);
  let row0 = tile.x * BLOCK_Q;
  let key0 = tile.y * BLOCK_K;
  let row = row0 + lane;
  let key = key0 + lane;
  let dk_start = ceil_div(params.n_k, BLOCK_K) * params.n_q * HEAD_DIM;
  let dv_start = dk_start + ceil_div(params.n_q, BLOCK_Q) * params.n_k * HEAD_DIM;

  if (lane < BLOCK_Q && row < params.n_q) {
    let seen = keys_seen(row);
    for (var c = 0u; c < min(BLOCK_K, params.n_k - key0); c++) {
      var p = 0.0;
      var ds = 0.0;
      if (key0 + c < seen) {
        var s = 0.0;
        var dp = 0.0;
        for (var d = 0u; d < HEAD_DIM; d++) {
          s += q[row * HEAD_DIM + d] * k[(key0 + c) * HEAD_DIM + d];
          dp += dout[row * HEAD_DIM + d] * v[(key0 + c) * HEAD_DIM + d];
        }
        p = exp_shift(s * params.scale - lse[row]);
        ds = p * (dp - delta[row]);
      }
      p_tile[lane * BLOCK_K + c] = p;
      ds_tile[lane * BLOCK_K + c] = ds;
      p_ds[row * params.n_k + key0 + c] = vec2<f32>(p, ds);
    }
    let n = min(max(seen, key0) - key0, BLOCK_K);
    for (var d = 0u; d < HEAD_DIM; d++) {
      var sum = 0.0;
      for (var c = 0u; c < n; c++) {
        sum += ds_tile[lane * BLOCK_K + c] * k[(key0 + c) * HEAD_DIM + d];
      }
      parts[(tile.y * params.n_q + row) * HEAD_DIM + d] = sum * params.scale;
    }
  }
  workgroupBarrier(); // publishes P and dS of the tile to the invocations that now own its keys

  if (lane < BLOCK_K && key < params.n_k) {
    let start = max(first_row(key), row0) - row0;
    let end = min(BLOCK_Q, params.n_q - row0);
    for (var d = 0u; d < HEAD_DIM; d++) {
      var dk = 0.0;
      var dv = 0.0;
      for (var r = start; r < end; r++) {
        dk += ds_tile[r * BLOCK_K + lane] * q[(row0 + r) * HEAD_DIM + d];
        dv += p_tile[r * BLOCK_K + lane] * dout[(row0 + r) * HEAD_DIM + d];
      }
      let at = (tile.x * params.n_k + key) * HEAD_DIM + d;
      parts[dk_start + at] = dk * params.scale;
      parts[dv_start + at] = dv;
    }
  }
}
