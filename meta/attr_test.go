package meta

import "testing"

func TestTime(t *testing.T) {
	for _, c := range []struct {
		sec  int64
		nsec uint32
	}{
		{0, 0}, {-1, 999_999_999}, {1, 5}, {FirstSecond, 0}, {FirstSecond, 1}, {LastSecond, 999_999_999},
		{1 << 31, 7}, {1 << 32, 7}, {9_223_372_036, 854_775_807}, {9_223_372_036, 854_775_808}, {13_569_465_600, 42},
	} {
		if sec, nsec := TimeOf(c.sec, c.nsec).Unix(); sec != c.sec || nsec != c.nsec {
			t.Errorf("%d.%09d became %d.%09d", c.sec, c.nsec, sec, nsec)
		}
	}
	for _, c := range []struct{ sec, want int64 }{{FirstSecond - 1, FirstSecond}, {LastSecond + 1, LastSecond}, {1<<63 - 1, LastSecond}, {-1 << 63, FirstSecond}} {
		if sec, nsec := TimeOf(c.sec, 9).Unix(); sec != c.want || nsec != 0 {
			t.Errorf("second %d became %d.%09d, want the nearest, %d", c.sec, sec, nsec, c.want)
		}
	}
	if Time(1_700_000_000_123_456_789) != TimeOf(1_700_000_000, 123_456_789) {
		t.Error("a time of today is not its plain count of nanoseconds")
	}
}
