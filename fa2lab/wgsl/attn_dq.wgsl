// Materialised backward, second of four dispatches.
//
//   dQ_i = scale · Σ_j dS_ij k_j
//
// An invocation owns one number of dQ. Masked keys are skipped by position.
// Dispatch: x = ceil(D / LANES), y = Tq, z = B·H.
//
// Constants: LANES, HEAD_DIM. Snippets: problem.wgsl.
// Source: Dao et al., FlashAttention, arXiv:2205.14135, appendix B.4, algorithm 3.

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> k: array<f32>;       // [B, Tk, Hkv, D]
@group(0) @binding(2) var<storage, read> dscores: array<f32>; // [B, H, Tq, Tk]
@group(0) @binding(3) var<storage, read_write> dq: array<f32>; // [B, Tq, H, D]

@compute @workgroup_size(LANES)
fn attn_dq(@builtin(global_invocation_id) global: vec3<u32>) {
  let id = offset_invocation(global, LANES);
  let d = id.x;
  let row = id.y;
  let bh = id.z;
  if (d >= HEAD_DIM) {
    return;
  }
  var sum = 0.0;
  for (var key = 0u; key < keys_seen(row); key++) {
    sum += dscores[(bh * params.n_q + row) * params.n_k + key] * k[kv_start(bh, key) + d];
  }
  dq[q_start(bh, row) + d] = sum * params.scale;
}
