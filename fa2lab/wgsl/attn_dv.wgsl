// Materialised backward, last of four dispatches.
//
//   dV_j = Σ_i P_ij dO_i     over the rows that see key j, and the query heads that read its KV head
//
// An invocation owns one number of dV.
// Dispatch: x = ceil(D / LANES), y = Tk, z = B·Hkv.
//
// Constants: LANES, HEAD_DIM. Snippets: problem.wgsl, rows.wgsl.
// Source: Dao et al., FlashAttention, arXiv:2205.14135, appendix B.4, algorithm 3.

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> dout: array<f32>;     // [B, Tq, H, D]
@group(0) @binding(2) var<storage, read> attn: array<f32>;     // [B, H, Tq, Tk]
@group(0) @binding(3) var<storage, read_write> dv: array<f32>; // [B, Tk, Hkv, D]

@compute @workgroup_size(LANES)
fn attn_dv(@builtin(global_invocation_id) global: vec3<u32>) {
  let id = offset_invocation(global, LANES);
  let d = id.x;
  let key = id.y;
  if (d >= HEAD_DIM) {
    return;
  }
  let group = params.n_heads / params.n_kv_heads;
  let first_bh = (id.z / params.n_kv_heads) * params.n_heads + (id.z % params.n_kv_heads) * group;
  var sum = 0.0;
  for (var bh = first_bh; bh < first_bh + group; bh++) {
    for (var row = first_row(key); row < params.n_q; row++) {
      sum += attn[(bh * params.n_q + row) * params.n_k + key] * dout[q_start(bh, row) + d];
    }
  }
  dv[kv_start(first_bh, key) + d] = sum;
}
