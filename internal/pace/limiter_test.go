package pace

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

func TestLimiterCountsOmittedMessages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got []string
		log := func(msg string, args ...any) { got = append(got, fmt.Sprint(msg, args)) }
		l := Limiter{Pause: time.Minute}
		for i := range 130 { // one each second
			l.Log(log, "lost", "n", i)
			time.Sleep(time.Second)
		}
		want := []string{"lost[n 0]", "lost[n 60 omitted 59]", "lost[n 120 omitted 59]"}
		if !slices.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	})
}
