// Naive attention, second of three dispatches: the softmax of every row, in place.
//
//   P = exp(S - m) / l     m = max S     l = Σ exp(S - m)     L = m + ln l
//
// The maximum is subtracted so that no exponential overflows; it takes a pass over the row of its own, since the
// whole row is at hand. An invocation owns one row. Masked places become 0.
// Dispatch: x = ceil(Tq / LANES), y = B·H.
//
// Constants: LANES. Snippets: problem.wgsl.
// Source: Milakov and Gimelshein, arXiv:1805.02867, algorithm 2 (the safe softmax).

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> attn: array<f32>; // [B, H, Tq, Tk], scores in, weights out
@group(0) @binding(2) var<storage, read_write> lse: array<f32>;  // [B, H, Tq]

@compute @workgroup_size(LANES)
fn naive_softmax(@builtin(global_invocation_id) global: vec3<u32>) {
  let id = offset_invocation(global, LANES);
  let row = id.x;
  let bh = id.y;
  if (row >= params.n_q) {
    return;
  }
  let seen = keys_seen(row);
  let start = (bh * params.n_q + row) * params.n_k;

  var m = M_NONE;
  for (var key = 0u; key < seen; key++) {
    m = max(m, attn[start + key]);
  }
  var l = 0.0;
  for (var key = 0u; key < seen; key++) {
    l += exp_shift(attn[start + key] - m);
  }
  for (var key = 0u; key < params.n_k; key++) {
    attn[start + key] = select(0.0, exp_shift(attn[start + key] - m) / l, key < seen);
  }
  lse[bh * params.n_q + row] = select(m + log_sum(l), params.neg_inf, seen == 0u);
}
