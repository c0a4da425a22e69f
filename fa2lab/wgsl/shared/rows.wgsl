// Which rows see a key.
// Expects: problem.wgsl.

// The first of them, Tq where none does. Every later row sees it as well.
fn first_row(key: u32) -> u32 {
  if (params.causal == 0u) {
    return 0u;
  }
  return u32(clamp(i32(key) - params.diagonal, 0, i32(params.n_q)));
}
