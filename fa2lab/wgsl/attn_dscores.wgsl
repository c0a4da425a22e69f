// Materialised backward, first of four dispatches: the gradient of the scores, all of them, from P as it was kept.
//
//   dP = dO Vᵀ     dS_ij = P_ij (dP_ij - Σ_k P_ik dP_ik)
//
// An invocation owns one query row; it leaves dP in dscores while it sums, then turns it into dS.
// P and dS take B·H·Tq·Tk floats each: this is what FlashAttention-2's backward does without.
// Dispatch: x = ceil(Tq / LANES), y = B·H.
//
// Constants: LANES, HEAD_DIM. Snippets: problem.wgsl.
// Source: Dao et al., FlashAttention, arXiv:2205.14135, appendix B.4, algorithm 3 (standard attention backward).

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> v: array<f32>;             // [B, Tk, Hkv, D]
@group(0) @binding(2) var<storage, read> dout: array<f32>;          // [B, Tq, H, D]
@group(0) @binding(3) var<storage, read> attn: array<f32>;          // [B, H, Tq, Tk]
@group(0) @binding(4) var<storage, read_write> dscores: array<f32>; // [B, H, Tq, Tk]

@compute @workgroup_size(LANES)
fn attn_dscores(@builtin(global_invocation_id) global: vec3<u32>) {
  let id = offset_invocation(global, LANES);
  let row = id.x;
  let bh = id.y;
  if (row >= params.n_q) {
    return;
  }
  let seen = keys_seen(row);
  let q_row = q_start(bh, row);
  let start = (bh * params.n_q + row) * params.n_k;

  var sum = 0.0;
  for (var key = 0u; key < seen; key++) {
    let kv_row = kv_start(bh, key);
    var dp = 0.0;
    for (var d = 0u; d < HEAD_DIM; d++) {
      dp += dout[q_row + d] * v[kv_row + d];
    }
    dscores[start + key] = dp;
    sum += attn[start + key] * dp;
  }
  for (var key = 0u; key < seen; key++) {
    dscores[start + key] = attn[start + key] * (dscores[start + key] - sum);
  }
}
