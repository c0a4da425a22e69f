// FlashAttention-2 backward, third of three dispatches: the gradients of K and V, with P recomputed tile by tile.
//
//   P_ij  = exp(S_ij - L_i)     dP_ij = dO_i · v_j     dS_ij = P_ij (dP_ij - delta_i)
//   dV_j  = Σ_i P_ij dO_i
//   dK_j  = scale · Σ_i dS_ij q_i
//
// both over the rows i that see key j, and over all query heads that read this KV head.
//
// A workgroup owns BLOCK_K keys (Bc) of one batch and KV head and walks the queries BLOCK_Q (Br) at a time, beginning
// with the first tile that sees any of its keys: causal tiles are skipped from the other end than in the forward.
// An invocation owns one key: its dK and dV live in private memory and are written once, in an order that never varies.
// Workgroup memory: (2·BLOCK_Q + 2·BLOCK_K) · HEAD_DIM · 4 bytes.
// Dispatch: x = ceil(Tk / BLOCK_K), y = B·Hkv.
//
// Constants: BLOCK_Q, BLOCK_K, HEAD_DIM. Snippets: problem.wgsl, rows.wgsl.
// Source: Dao, FlashAttention-2, arXiv:2307.08691, algorithm 2.

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> q: array<f32>;        // [B, Tq, H, D]
@group(0) @binding(2) var<storage, read> k: array<f32>;        // [B, Tk, Hkv, D]
@group(0) @binding(3) var<storage, read> v: array<f32>;        // [B, Tk, Hkv, D]
@group(0) @binding(4) var<storage, read> dout: array<f32>;     // [B, Tq, H, D]
@group(0) @binding(5) var<storage, read> lse: array<f32>;      // [B, H, Tq]
@group(0) @binding(6) var<storage, read> delta: array<f32>;    // [B, H, Tq]
@group(0) @binding(7) var<storage, read_write> dk: array<f32>; // [B, Tk, Hkv, D]
@group(0) @binding(8) var<storage, read_write> dv: array<f32>; // [B, Tk, Hkv, D]

var<workgroup> k_tile: array<f32, BLOCK_K * HEAD_DIM>;
var<workgroup> v_tile: array<f32, BLOCK_K * HEAD_DIM>;
var<workgroup> q_tile: array<f32, BLOCK_Q * HEAD_DIM>;
var<workgroup> dout_tile: array<f32, BLOCK_Q * HEAD_DIM>;

@compute @workgroup_size(BLOCK_K)
fn fa2_dkv(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let workgroup = offset_id(id);
  let group = params.n_heads / params.n_kv_heads;
  let batch = workgroup.y / params.n_kv_heads;
  let first_bh = batch * params.n_heads + (workgroup.y % params.n_kv_heads) * group;
  let key0 = workgroup.x * BLOCK_K;
  let key = key0 + lane;
  let in_range = key < params.n_k;

  for (var i = lane; i < BLOCK_K * HEAD_DIM; i += BLOCK_K) {
    let j = key0 + i / HEAD_DIM;
    if (j < params.n_k) {
      k_tile[i] = k[kv_start(first_bh, j) + i % HEAD_DIM];
      v_tile[i] = v[kv_start(first_bh, j) + i % HEAD_DIM];
    } else {
      k_tile[i] = 0.0;
      v_tile[i] = 0.0;
    }
  }

  var dk_row: array<f32, HEAD_DIM>;
  var dv_row: array<f32, HEAD_DIM>;
  let first_tile = first_row(key0) / BLOCK_Q; // rows before it see none of this workgroup's keys
  for (var bh = first_bh; bh < first_bh + group; bh++) {
    for (var row0 = first_tile * BLOCK_Q; row0 < params.n_q; row0 += BLOCK_Q) {
      workgroupBarrier(); // every key is done with the previous query tile before it is overwritten
      for (var i = lane; i < BLOCK_Q * HEAD_DIM; i += BLOCK_K) {
        let r = row0 + i / HEAD_DIM;
        if (r < params.n_q) {
          q_tile[i] = q[q_start(bh, r) + i % HEAD_DIM];
          dout_tile[i] = dout[q_start(bh, r) + i % HEAD_DIM];
        } else {
          q_tile[i] = 0.0;
          dout_tile[i] = 0.0;
        }
      }
      workgroupBarrier(); // publishes the query tile (and, the first time, the tiles of K and V)

      // The rows that see this key: the mask leaves each row a prefix of the keys, and so each key a suffix of the rows.
      let start = max(first_row(key), row0) - row0;
      let end = select(0u, min(BLOCK_Q, params.n_q - row0), in_range);
      for (var r = start; r < end; r++) {
        var s = 0.0;
        var dp = 0.0;
        for (var d = 0u; d < HEAD_DIM; d++) {
          s += q_tile[r * HEAD_DIM + d] * k_tile[lane * HEAD_DIM + d];
          dp += dout_tile[r * HEAD_DIM + d] * v_tile[lane * HEAD_DIM + d];
        }
        let p = exp_shift(s * params.scale - lse[bh * params.n_q + row0 + r]);
        let ds = p * (dp - delta[bh * params.n_q + row0 + r]);
        for (var d = 0u; d < HEAD_DIM; d++) {
          dv_row[d] += p * dout_tile[r * HEAD_DIM + d];
          dk_row[d] += ds * q_tile[r * HEAD_DIM + d];
        }
      }
    }
  }

  if (in_range) {
    let start = kv_start(first_bh, key);
    for (var d = 0u; d < HEAD_DIM; d++) {
      dk[start + d] = dk_row[d] * params.scale;
      dv[start + d] = dv_row[d];
    }
  }
}
