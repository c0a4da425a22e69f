// FlashAttention-2 backward, first of three dispatches: what each row's softmax gives back to all of its scores.
//
//   delta_i = Σ_d dO_id · O_id
//
// It stands for Σ_j P_ij dP_ij, the sum over the keys that the derivative of a softmax row needs: with O = P V and
// dP = dO Vᵀ both are the same number, but this one takes D products and no P.
// An invocation owns one row. A row that sees no key has delta = 0, whatever dO holds there.
// Dispatch: x = ceil(Tq / LANES), y = B·H.
//
// Constants: LANES, HEAD_DIM; alias Element (of O and dO). Snippets: problem.wgsl.
// Source: Dao, FlashAttention-2, arXiv:2307.08691, algorithm 2, line 4 (its D); Dao et al., arXiv:2205.14135,
// appendix B.2, equation 4.

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> out: array<Element>;     // [B, Tq, H, D]
@group(0) @binding(2) var<storage, read> dout: array<Element>;    // [B, Tq, H, D]
@group(0) @binding(3) var<storage, read_write> delta: array<f32>; // [B, H, Tq]

@compute @workgroup_size(LANES)
fn fa2_delta(@builtin(global_invocation_id) global: vec3<u32>) {
  let id = offset_invocation(global, LANES);
  let row = id.x;
  let bh = id.y;
  if (row >= params.n_q) {
    return;
  }
  let start = q_start(bh, row);
  var sum = 0.0;
  for (var d = 0u; d < HEAD_DIM; d++) {
    sum += f32(dout[start + d]) * f32(out[start + d]);
  }
  delta[bh * params.n_q + row] = select(sum, 0.0, keys_seen(row) == 0u);
}
