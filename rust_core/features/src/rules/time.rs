//! Timestamps, dates and their parts.

use jiff::civil::{Date, DateTime};
use jiff::fmt::temporal::Pieces;
use jiff::tz::TimeZone;
use jiff::{Span, Timestamp};
use persia_types::config::features::{DatePart, Epoch};

/// A point in time, or a day without a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    /// The seconds since 1970-01-01T00:00:00Z, rounded down.
    Instant(i64),
    /// The days since 1970-01-01, without a zone.
    Day(i64),
}

const DAY: i64 = 86_400;
const EPOCH: Date = Date::constant(1970, 1, 1);

/// The moment that an integer in this unit represents.
pub(crate) fn from_integer(value: i64, unit: Epoch) -> Moment {
    let per_second = match unit {
        Epoch::Seconds => 1,
        Epoch::Milliseconds => 1_000,
        Epoch::Microseconds => 1_000_000,
        Epoch::Nanoseconds => 1_000_000_000,
    };
    Moment::Instant(value.div_euclid(per_second))
}

/// Parse an ISO 8601 date or timestamp: `2024-05-01`, `2024-05-01 10:00`, `2024-05-01T10:00:00.5+02:00`. A timestamp
/// without an offset is UTC.
pub(crate) fn parse(text: &[u8]) -> Option<Moment> {
    let pieces = Pieces::parse(text).ok()?;
    let date = pieces.date();
    let Some(time) = pieces.time() else {
        return pieces.offset().is_none().then(|| Moment::Day(days(date)));
    };
    let offset = pieces.to_numeric_offset().map_or(0, |offset| i64::from(offset.seconds()));
    let second = i64::from(time.hour()) * 3600 + i64::from(time.minute()) * 60 + i64::from(time.second());
    Some(Moment::Instant(days(date) * DAY + second - offset))
}

fn days(date: Date) -> i64 {
    date.duration_since(EPOCH).as_hours() / 24
}

/// The time zone with this name in the compiled-in database.
pub(crate) fn zone(name: &str) -> Option<TimeZone> {
    if name == "UTC" { Some(TimeZone::UTC) } else { TimeZone::get(name).ok() }
}

/// Whether this part needs a time of day, which a [`Moment::Day`] does not have.
pub(crate) fn needs_time(part: DatePart) -> bool {
    matches!(part, DatePart::Minute | DatePart::Hour | DatePart::HourOfWeek)
}

/// The part of a moment in a zone; None outside the years -9999 to 9999, and for a day if the part needs a time of day.
pub(crate) fn part_of(moment: Moment, part: DatePart, zone: &TimeZone) -> Option<i64> {
    let local: DateTime = match moment {
        Moment::Day(_) if needs_time(part) => return None,
        Moment::Instant(second) => {
            let instant = Timestamp::from_second(second).ok()?;
            zone.to_offset(instant).to_datetime(instant)
        }
        Moment::Day(days) => EPOCH.checked_add(Span::new().try_days(days).ok()?).ok()?.at(0, 0, 0, 0),
    };
    let hour = i64::from(local.hour());
    let weekday = i64::from(local.weekday().to_monday_zero_offset());
    Some(match part {
        DatePart::Minute => i64::from(local.minute()),
        DatePart::Hour => hour,
        DatePart::Weekday => weekday,
        DatePart::HourOfWeek => 24 * weekday + hour,
        DatePart::Day => i64::from(local.day()),
        DatePart::DayOfYear => i64::from(local.day_of_year()),
        DatePart::Month => i64::from(local.month()),
        DatePart::Quarter => (i64::from(local.month()) + 2) / 3,
        DatePart::Year => i64::from(local.year()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iso_8601_is_read() {
        for (text, seconds) in [
            ("1970-01-01T00:00:01Z", 1),
            ("1970-01-01 00:00", 0),
            ("1970-01-01T02:00:00+02:00", 0),
            ("1969-12-31T23:59:59.5Z", -1),
            ("2024-02-29T12:30:00.123456789Z", 1_709_209_800),
        ] {
            assert_eq!(parse(text.as_bytes()), Some(Moment::Instant(seconds)), "{text}");
        }
        assert_eq!(parse(b"1970-01-02"), Some(Moment::Day(1)));
        for text in ["", "yesterday", "2024-13-01", "2024-02-30", "12:30", "1709209800", "2024-01-01T25:00"] {
            assert_eq!(parse(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn the_first_and_the_last_day_of_the_calendar_have_their_years() {
        for (text, year) in [
            ("9999-12-31", 9999),
            ("9999-12-01T00:00:00Z", 9999),
            ("0001-01-01", 1),
            ("-009999-01-01", -9999),
        ] {
            assert_eq!(
                part_of(parse(text.as_bytes()).unwrap(), DatePart::Year, &TimeZone::UTC),
                Some(year),
                "{text}"
            );
        }
    }

    #[test]
    fn parts_are_those_of_the_zone() {
        let moment = parse(b"2024-03-31T00:30:00Z").unwrap(); // 30 minutes before daylight saving time
        let berlin = zone("Europe/Berlin").unwrap();
        assert_eq!(part_of(moment, DatePart::Hour, &TimeZone::UTC), Some(0));
        assert_eq!(part_of(moment, DatePart::Hour, &berlin), Some(1));
        let later = parse(b"2024-03-31T01:30:00Z").unwrap();
        assert_eq!(part_of(later, DatePart::Hour, &berlin), Some(3));
        let new_york = zone("America/New_York").unwrap();
        assert_eq!(part_of(moment, DatePart::Day, &new_york), Some(30));
        // A day has no zone.
        assert_eq!(part_of(parse(b"2024-03-31").unwrap(), DatePart::Day, &new_york), Some(31));
    }

    #[test]
    fn every_part_has_its_number() {
        let moment = parse(b"2024-12-29T23:59:00").unwrap(); // a Sunday
        for (part, number) in [
            (DatePart::Minute, 59),
            (DatePart::Hour, 23),
            (DatePart::Weekday, 6),
            (DatePart::HourOfWeek, 167),
            (DatePart::Day, 29),
            (DatePart::DayOfYear, 364),
            (DatePart::Month, 12),
            (DatePart::Quarter, 4),
            (DatePart::Year, 2024),
        ] {
            assert_eq!(part_of(moment, part, &TimeZone::UTC), Some(number), "{part:?}");
        }
    }

    #[test]
    fn what_is_beyond_the_calendar_has_no_part() {
        for second in [i64::MIN, i64::MAX, 1 << 60] {
            assert_eq!(part_of(Moment::Instant(second), DatePart::Hour, &TimeZone::UTC), None);
            assert_eq!(part_of(Moment::Day(second), DatePart::Weekday, &TimeZone::UTC), None);
        }
    }

    #[test]
    fn a_day_has_no_part_that_needs_a_time() {
        let day = parse(b"2024-12-29").unwrap(); // a Sunday
        for part in [DatePart::Minute, DatePart::Hour, DatePart::HourOfWeek] {
            assert_eq!(part_of(day, part, &TimeZone::UTC), None, "{part:?}");
        }
        assert_eq!(part_of(day, DatePart::Weekday, &TimeZone::UTC), Some(6));
    }
}
