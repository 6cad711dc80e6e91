//! Reads the block `labels`.

use super::rules::{Label, Loss, Target};
use crate::config::reader::{Reader, join};
use crate::config::tree::{Node, Value};

const PATH: &str = "labels";
const EXAMPLE: &str = "name at least one label, such as `clicked: {column: click}`";
const KEYS: &[&str] = &["column", "greater_than", "equals", "weight", "loss"];
const LOSSES: &[(&str, Loss)] = &[("bce", Loss::Bce), ("mse", Loss::Mse)];

/// Read all labels.
pub(super) fn read(reader: &mut Reader, root: &Node) -> Vec<Label> {
    let Some(node) = super::read::block(reader, root, PATH, EXAMPLE) else { return Vec::new() };
    let section = reader.mapping(node, PATH);
    let mut labels = Vec::new();
    for (key, node) in section.entries() {
        let path = join(PATH, &key.text);
        reader.check_name(&key.text, key.place, &path);
        let label = read_label(reader, &key.text, node, &path);
        labels.push(Label { line: key.place.line, ..label });
    }
    labels
}

fn read_label(reader: &mut Reader, name: &str, node: &Node, path: &str) -> Label {
    let at = |key: &str| format!("{path}.{key}");
    let section = reader.section(node, path, KEYS);
    let column = reader.text(&section, &at("column")).unwrap_or(name).to_owned();
    let greater = reader.number(&section, &at("greater_than"), f32::MIN..=f32::MAX);
    let target = match (section.get("greater_than"), section.get("equals")) {
        (Some(_), Some(equals)) => {
            let message = "found together with `greater_than`; allowed: one of the two".into();
            reader.error(equals.place, &at("equals"), message);
            Target::Value
        }
        (Some(_), None) => Target::GreaterThan(greater.unwrap_or_default()),
        (None, Some(equals)) => equals_target(reader, equals, &at("equals")),
        (None, None) => Target::Value,
    };
    let loss = reader.choice(&section, &at("loss"), LOSSES).unwrap_or(Loss::Bce);
    if let (Loss::Mse, Some(node), false) = (loss, section.get("loss"), target == Target::Value) {
        let message = "found `mse` for a label of 0 and 1; allowed: bce, or omit greater_than and equals";
        reader.error(node.place, &at("loss"), message.into());
    }
    let weight = reader.number(&section, &at("weight"), 0.0..=f32::MAX).unwrap_or(1.0);
    Label { name: name.into(), line: 0, column, target, weight, loss }
}

/// Read a target value. A number without quotes is a number, `true` is 1, and `false` is 0. Any other value
/// is a string.
fn equals_target(reader: &mut Reader, node: &Node, path: &str) -> Target {
    if let Some(number) = node.as_number() {
        return Target::EqualsNumber(number);
    }
    match &node.value {
        Value::Scalar { text, quoted: false } if text == "true" => Target::EqualsNumber(1.0),
        Value::Scalar { text, quoted: false } if text == "false" => Target::EqualsNumber(0.0),
        Value::Scalar { text, .. } if !node.is_null() => Target::EqualsText(text.clone()),
        _ => {
            reader.error(node.place, path, format!("found {}, allowed: a number or a string", node.found()));
            Target::Value
        }
    }
}
