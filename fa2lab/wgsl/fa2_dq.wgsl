// FlashAttention-2 backward, second of three dispatches: the gradient of Q, with P recomputed tile by tile.
//
//   P_ij  = exp(S_ij - L_i)              from the forward's L: no maximum, no sum, no matrix kept
//   dP_ij = dO_i · v_j
//   dS_ij = P_ij (dP_ij - delta_i)
//   dQ_i  = scale · Σ_j dS_ij k_j
//
// A workgroup owns BLOCK_Q query rows (Br) of one batch and head and walks the keys BLOCK_K (Bc) at a time, as the
// forward does, and stops where the forward stops. dQ is written once; nothing is added up across workgroups.
// An invocation owns one query row: its dQ lives in private memory.
// Workgroup memory: (2·BLOCK_Q + 2·BLOCK_K) · HEAD_DIM · 4 bytes. Dispatch: x = ceil(Tq / BLOCK_Q), y = B·H.
//
// Constants: BLOCK_Q, BLOCK_K, HEAD_DIM. Snippets: problem.wgsl.
// Source: Dao, FlashAttention-2, arXiv:2307.08691, algorithm 2; its section 3.2 adds dQ up by atomics across key
// blocks; here a second walk does without.

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> q: array<f32>;        // [B, Tq, H, D]
@group(0) @binding(2) var<storage, read> k: array<f32>;        // [B, Tk, Hkv, D]
@group(0) @binding(3) var<storage, read> v: array<f32>;        // [B, Tk, Hkv, D]
@group(0) @binding(4) var<storage, read> dout: array<f32>;     // [B, Tq, H, D]
@group(0) @binding(5) var<storage, read> lse: array<f32>;      // [B, H, Tq]
@group(0) @binding(6) var<storage, read> delta: array<f32>;    // [B, H, Tq]
@group(0) @binding(7) var<storage, read_write> dq: array<f32>; // [B, Tq, H, D]

var<workgroup> q_tile: array<f32, BLOCK_Q * HEAD_DIM>;
var<workgroup> dout_tile: array<f32, BLOCK_Q * HEAD_DIM>;
var<workgroup> k_tile: array<f32, BLOCK_K * HEAD_DIM>;
var<workgroup> v_tile: array<f32, BLOCK_K * HEAD_DIM>;

@compute @workgroup_size(BLOCK_Q)
fn fa2_dq(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let workgroup = offset_id(id);
  let bh = workgroup.y;
  let row0 = workgroup.x * BLOCK_Q;
  let row = row0 + lane;
  let seen = keys_seen(row);
  let seen_by_tile = keys_seen(min(row0 + BLOCK_Q, params.n_q) - 1u); // the tile's last row sees the most

  for (var i = lane; i < BLOCK_Q * HEAD_DIM; i += BLOCK_Q) {
    let r = row0 + i / HEAD_DIM;
    if (r < params.n_q) {
      q_tile[i] = q[q_start(bh, r) + i % HEAD_DIM];
      dout_tile[i] = dout[q_start(bh, r) + i % HEAD_DIM];
    } else {
      q_tile[i] = 0.0;
      dout_tile[i] = 0.0;
    }
  }
  var row_lse = 0.0;
  var row_delta = 0.0;
  if (seen > 0u) {
    row_lse = lse[bh * params.n_q + row];
    row_delta = delta[bh * params.n_q + row];
  }

  var dq_row: array<f32, HEAD_DIM>;
  for (var key0 = 0u; key0 < seen_by_tile; key0 += BLOCK_K) {
    workgroupBarrier(); // every row is done with the previous K and V tile before it is overwritten
    for (var i = lane; i < BLOCK_K * HEAD_DIM; i += BLOCK_Q) {
      let key = key0 + i / HEAD_DIM;
      if (key < params.n_k) {
        k_tile[i] = k[kv_start(bh, key) + i % HEAD_DIM];
        v_tile[i] = v[kv_start(bh, key) + i % HEAD_DIM];
      } else {
        k_tile[i] = 0.0;
        v_tile[i] = 0.0;
      }
    }
    workgroupBarrier(); // publishes the K and V tile (and, the first time, the tiles of Q and dO)

    let n = min(max(seen, key0) - key0, BLOCK_K); // how many of the tile's keys this row sees
    for (var c = 0u; c < n; c++) {
      var s = 0.0;
      var dp = 0.0;
      for (var d = 0u; d < HEAD_DIM; d++) {
        s += q_tile[lane * HEAD_DIM + d] * k_tile[c * HEAD_DIM + d];
        dp += dout_tile[lane * HEAD_DIM + d] * v_tile[c * HEAD_DIM + d];
      }
      let p = exp_shift(s * params.scale - row_lse);
      let ds = p * (dp - row_delta);
      for (var d = 0u; d < HEAD_DIM; d++) {
        dq_row[d] += ds * k_tile[c * HEAD_DIM + d];
      }
    }
  }

  if (row < params.n_q) {
    let start = q_start(bh, row);
    for (var d = 0u; d < HEAD_DIM; d++) {
      dq[start + d] = dq_row[d] * params.scale;
    }
  }
}
