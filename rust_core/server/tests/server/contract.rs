//! Runs the contract of `Tables` over the network.

use std::sync::Arc;

use persia_contract as contract;

use crate::stack::{Held, Plan, Stack};

fn keeps_the_contract(plan: Plan) {
    let plan = Plan { job: "contract".into(), schema: contract::schema(), ..plan };
    contract::run_all(&|| {
        let stack = Stack::start(plan.clone());
        Arc::new(Held { tables: stack.client(), _below: stack })
    });
}

#[test]
fn one_server() {
    keeps_the_contract(Plan { middleware: false, ..Plan::new(1) });
}

#[test]
fn a_middleware_and_one_server() {
    keeps_the_contract(Plan::new(1));
}

#[test]
fn a_middleware_and_three_servers() {
    keeps_the_contract(Plan::new(3));
}

#[test]
fn a_middleware_and_three_servers_over_unix_sockets() {
    keeps_the_contract(Plan { unix: true, ..Plan::new(3) });
}
