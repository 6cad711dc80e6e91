//! [`with_causes`]: the text of an error with its causes.

use std::error::Error;

/// The text of `error`, followed by those of its causes, outermost first, without a period at the end. A cause that the
/// text contains already is omitted. The errors of the transport say nothing without their causes.
pub(crate) fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text.trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Outer {
        text: &'static str,
        source: io::Error,
    }

    #[test]
    fn every_cause_is_in_the_text_once() {
        let of = |text| Outer { text, source: io::Error::other("the certificate is damaged.") };
        assert_eq!(with_causes(&of("transport error")), "transport error: the certificate is damaged");
        let of_all = with_causes(&of("cannot connect: the certificate is damaged."));
        assert_eq!(of_all, "cannot connect: the certificate is damaged");
        assert_eq!(with_causes(&io::Error::other("alone")), "alone");
    }
}
