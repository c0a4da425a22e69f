// dO by the vec4, as qkv_scalar.wgsl. Expects: dout: array<Stored>. Constants: HEAD_DIM; alias Stored.

fn dout_vec4(start: u32, chunk: u32) -> vec4<f32> {
  var value = vec4<f32>();
  for (var d = chunk * 4u; d < min(chunk * 4u + 4u, HEAD_DIM); d++) {
    value[d % 4u] = f32(dout[start + d]);
  }
  return value;
}
