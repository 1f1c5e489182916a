package faults_test

import (
	"os"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
)

// everything is a plan with every fault.
const everything = "seed=42,disconnect-every=100,post-fail=50:2,flush-reg=200,reg-error=300,linv-error=~301,delay-reply=30:20ms,lose-reply=500," +
	"credits=1,alloc-fail=40,dereg-fail=1000,connect-fail=3,late-write=100:5ms,late-read=100:7ms,stale-key=9,wild-write=~10"

func TestParse(t *testing.T) {
	for _, c := range []struct{ spec, want string }{
		{"seed=42", "seed=42"},
		{"seed=0x2a", "seed=42"},
		{"seed=18446744073709551615", "seed=18446744073709551615"},
		{everything, everything},
		{" seed=1 , lose-reply=7 ", "seed=1,lose-reply=7"},
		{"lose-reply=7,seed=1", "seed=1,lose-reply=7"},
		{"lose-reply=~7,disconnect-every=1,seed=1", "seed=1,disconnect-every=1,lose-reply=~7"},
		{"seed=1,post-fail=~50:*", "seed=1,post-fail=~50:*"},
		{"seed=1,post-fail=50:0", "seed=1,post-fail=50:0"},
		{"seed=1,delay-reply=1:1500ms", "seed=1,delay-reply=1:1.5s"},
		{"seed=1,late-write=100", "seed=1,late-write=100:5ms"},
		{"seed=1,late-read=~100:1s", "seed=1,late-read=~100:1s"},
		{"seed=1,credits=0", "seed=1,credits=0"},
	} {
		p, err := faults.Parse(c.spec)
		if err != nil {
			t.Errorf("%q: %v", c.spec, err)
			continue
		}
		if p.String() != c.want {
			t.Errorf("%q is printed as %q, want %q", c.spec, p, c.want)
		}
		if again := parse(t, p.String()); *again != *p {
			t.Errorf("%q read again is %q", p, again)
		}
	}
}

func TestParseErrors(t *testing.T) {
	for _, c := range []struct{ spec, word string }{
		{"disconnect=5", "disconnect=5"},
		{"seed=1,,lose-reply=2", ""},
		{"lose-reply", "lose-reply"},
		{"lose-reply=2,", ""},
		{"seed=1,lose-reply=0", "lose-reply=0"},
		{"lose-reply=-1", "lose-reply=-1"},
		{"lose-reply=~", "lose-reply=~"},
		{"lose-reply=100~", "lose-reply=100~"},
		{"lose-reply=7:2", "lose-reply=7:2"},
		{"lose-reply=7,lose-reply=8", "lose-reply=8"},
		{"seed=1,seed=2", "seed=2"},
		{"seed=", "seed="},
		{"seed=-1", "seed=-1"},
		{"post-fail=50", "post-fail=50"},
		{"post-fail=50:-1", "post-fail=50:-1"},
		{"post-fail=50:99999999999", "post-fail=50:99999999999"},
		{"delay-reply=3", "delay-reply=3"},
		{"delay-reply=3:-5ms", "delay-reply=3:-5ms"},
		{"delay-reply=3:0s", "delay-reply=3:0s"},
		{"delay-reply=3:5", "delay-reply=3:5"},
		{"delay-reply=3:1000h", "delay-reply=3:1000h"},
		{"late-write=3:", "late-write=3:"},
		{"credits=~1", "credits=~1"},
		{"credits=4294967296", "credits=4294967296"},
	} {
		_, err := faults.Parse(c.spec)
		if err == nil {
			t.Errorf("%q was taken", c.spec)
			continue
		}
		if !strings.Contains(err.Error(), `"`+c.word+`"`) || !strings.Contains(err.Error(), "post-fail=N:K") {
			t.Errorf("%q: %v; want the word %q and the list of faults", c.spec, err, c.word)
		}
	}
}

// TestParseSeed: a plan without a seed gets one of its own each time, and prints it.
func TestParseSeed(t *testing.T) {
	a, b := parse(t, "lose-reply=2"), parse(t, "lose-reply=2")
	if a.Seed() == b.Seed() {
		t.Errorf("both plans have the seed %d", a.Seed())
	}
	if again := parse(t, a.String()); again.Seed() != a.Seed() {
		t.Errorf("%q has the seed %d, want %d", a, again.Seed(), a.Seed())
	}
	if !parse(t, "").Empty() || !parse(t, "seed=3").Empty() || a.Empty() {
		t.Error("Empty is wrong")
	}
}

// TestDocumented: every fault is in the table of the package page, with its syntax, and in the
// sample of this test.
func TestDocumented(t *testing.T) {
	doc, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range faults.All() {
		if f.Does == "" || f.Expect == "" || f.Syntax == "" {
			t.Errorf("%s lacks a description", f.Name)
		}
		if !strings.Contains(string(doc), "//   - "+f.Name+"="+f.Syntax+": ") {
			t.Errorf("doc.go does not describe %s=%s", f.Name, f.Syntax)
		}
		if !strings.Contains(everything, ","+f.Name+"=") {
			t.Errorf("the sample plan lacks %s", f.Name)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"", everything, "seed=1,post-fail=~50:*", "credits=1,credits=2", "late-write=1:1h,=,~"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, spec string) {
		p, err := faults.Parse(spec)
		if err != nil {
			return
		}
		again, err := faults.Parse(p.String())
		if err != nil || *again != *p {
			t.Fatalf("%q is printed as %q, which is read as %v, %v", spec, p, again, err)
		}
	})
}
