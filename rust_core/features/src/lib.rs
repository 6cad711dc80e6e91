//! Feature transforms. The declarations of features are compiled once into a transform. The transform converts equal
//! values to equal ids and floats, whether they are in an Arrow record batch of any layout or in a JSON record.
//!
//! * [`Features`]: the blocks `features` and `labels` of `persia.yml`
//! * [`Fitter`]: computes the fitted values in one pass over the training data
//! * [`Transform`]: features with their fitted values, and their digest
//! * [`Samples`]: the output of a transform, that is, ids, floats and labels
//! * [`Report`]: counts of unusual values for each feature
//! * [`Records`]: JSON records as input
//! * [`hash`]: how values become ids
//!
//! Every value, from Arrow or JSON, becomes a `Cell` before a rule is applied, so there is only one set of rules.

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
