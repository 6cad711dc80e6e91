//! Feature transforms: a description, compiled once, makes the same ids and floats of the same values wherever they come
//! from, an Arrow record batch of any layout or a JSON record.
//!
//! * [`Features`]: the blocks `features` and `labels` of `persia.yml`
//! * [`Fitter`]: one pass over the training data, which finds the fitted numbers
//! * [`Transform`]: features with their fitted numbers, and their digest
//! * [`Samples`]: what a transform makes: ids, floats and labels
//! * [`Report`]: how often each feature met something unusual
//! * [`Records`]: JSON records as input
//! * [`hash`]: how values become ids
//!
//! Every value, of Arrow and of JSON, is one `Cell` before any rule looks at it, so that there is one set of rules.

mod error;
mod features;
mod fit;
pub mod hash;
mod input;
mod report;
mod rules;
mod samples;
mod transform;

pub use error::{DataErrors, Mistake, TransformError};
pub use features::Features;
pub use fit::Fitter;
pub use fit::fitted::{Fitted, FittedFeature};
pub use input::records::{Records, Value};
pub use report::{Report, Unusual};
pub use samples::{Ids, Names, Samples};
pub use transform::{Options, Transform};
