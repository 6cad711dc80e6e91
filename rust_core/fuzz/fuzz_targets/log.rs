#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    persia_fuzz::log::check(data);
});
