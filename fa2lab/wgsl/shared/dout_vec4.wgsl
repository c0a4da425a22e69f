// dO by the vec4, as qkv_vec4.wgsl. Expects: dout: array<Stored>. Constants: alias Stored.

fn dout_vec4(start: u32, chunk: u32) -> vec4<f32> {
  return vec4<f32>(dout[start / 4u + chunk]);
}
