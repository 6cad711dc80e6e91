//! [`Place::probe`]: checks whether a store accepts objects, and whether it supports conditional puts.

use std::{env, io};

use crate::failure::Failure;
use crate::place::{Place, Put, Result};

/// The variable of the crate `object_store` that disables conditional puts.
const CONDITIONAL: &str = "AWS_CONDITIONAL_PUT";
const CONTENT: &[u8] = b"persia\n";

impl Place {
    /// Put an object, try to put it again on the condition that it does not exist, and delete it. A checkpoint is
    /// committed by such a conditional put. With a store that ignores the condition, two saves could replace each
    /// other. The condition is not tried if `AWS_CONDITIONAL_PUT` disables it.
    ///
    /// # Errors
    /// The store refuses a request, does not respond, does not support the condition, or replaces the object
    /// despite the condition.
    pub fn probe(&self, name: &str) -> Result<()> {
        self.put(name, CONTENT.to_vec())?;
        let checked = if is_conditional() { self.check_condition(name) } else { Ok(()) };
        let deleted = self.delete([name.to_owned()]);
        checked.and(deleted)
    }

    fn check_condition(&self, name: &str) -> Result<()> {
        let what = match self.put_over(name, CONTENT.to_vec(), None) {
            Ok(Put::Changed) => return Ok(()),
            Ok(Put::Done) => {
                "the store replaced an object despite the header If-None-Match of the request".to_owned()
            }
            Err(failure) if is_unknown(&failure) => failure.source.to_string(),
            Err(failure) => return Err(failure),
        };
        let advice = "checkpoints are committed by conditional puts: use a store that supports them, or set \
                      AWS_CONDITIONAL_PUT=disabled for trainers and servers and let only one job at a time save below \
                      this URL";
        Err(Failure::new(self.url_of(name), io::ErrorKind::Unsupported, format!("{what}; {advice}")))
    }
}

fn is_conditional() -> bool {
    !env::var(CONDITIONAL).is_ok_and(|value| value.trim().eq_ignore_ascii_case("disabled"))
}

/// Whether a store responds with a status that means that it does not support the condition: 501 or 400.
fn is_unknown(failure: &Failure) -> bool {
    let text = failure.source.to_string();
    ["the store answered 501", "the store answered 400"].iter().any(|known| text.contains(known))
}
