package faults_test

import (
	"os"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs/faults"
	"github.com/nfsrdmad/nfsrdmad/test/kit"
)

// allFaults is a plan with every fault.
const allFaults = "seed=42,disconnect-every=100,post-fail=50:2,flush-reg=200,reg-error=300,linv-error=~301," +
	"delay-reply=30:20ms,lose-reply=500,credits=1,alloc-fail=40,dereg-fail=1000,connect-fail=3," +
	"late-write=100:5ms,late-read=100:7ms,stale-key=9,wild-write=~10"

func TestParseAndPrint(t *testing.T) {
	for _, c := range []struct{ spec, want string }{
		{"seed=42", "seed=42"},
		{"seed=0x2a", "seed=42"},
		{"seed=18446744073709551615", "seed=18446744073709551615"},
		{allFaults, allFaults},
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
			t.Errorf("parse %q: %v", c.spec, err)
			continue
		}
		if p.String() != c.want {
			t.Errorf("print plan %q: got %q, want %q", c.spec, p, c.want)
		}
		if again := parse(t, p.String()); *again != *p {
			t.Errorf("parse printed plan %q: got %q", p, again)
		}
	}
}

func TestParseErrors(t *testing.T) {
	for _, c := range []struct{ spec, word string }{
		{"disconnect=5", "disconnect=5"},
		{"seed=1,,lose-reply=2", ""},
		{"lose-reply", "lose-reply"},
		{"seed=1,lose-reply=0", "lose-reply=0"},
		{"lose-reply=-1", "lose-reply=-1"},
		{"lose-reply=7:2", "lose-reply=7:2"},
		{"lose-reply=7,lose-reply=8", "lose-reply=8"},
		{"seed=1,seed=2", "seed=2"},
		{"post-fail=50", "post-fail=50"},
		{"delay-reply=3", "delay-reply=3"},
		{"delay-reply=3:-5ms", "delay-reply=3:-5ms"},
		{"delay-reply=3:1000h", "delay-reply=3:1000h"},
		{"credits=~1", "credits=~1"},
		{"credits=4294967296", "credits=4294967296"},
	} {
		_, err := faults.Parse(c.spec)
		if err == nil {
			t.Errorf("parse %q: got no error, want one", c.spec)
			continue
		}
		if !strings.Contains(err.Error(), `"`+c.word+`"`) || !strings.Contains(err.Error(), "post-fail=N:K") {
			t.Errorf("parse %q: got %v, want an error with %q and the list of faults", c.spec, err, c.word)
		}
	}
}

// TestParseChoosesSeed checks that Parse chooses a new seed each time, and that the printed plan
// contains it.
func TestParseChoosesSeed(t *testing.T) {
	a, b := parse(t, "lose-reply=2"), parse(t, "lose-reply=2")
	if a.Seed() == b.Seed() {
		t.Errorf("both plans have seed %d, want different seeds", a.Seed())
	}
	if again := parse(t, a.String()); again.Seed() != a.Seed() {
		t.Errorf("seed of %q: got %d, want %d", a, again.Seed(), a.Seed())
	}
	if !parse(t, "").Empty() || !parse(t, "seed=3").Empty() || a.Empty() {
		t.Error("Empty: got a wrong result")
	}
}

// TestEveryFaultIsDocumented checks that doc.go lists every fault with its syntax, and that
// allFaults contains it.
func TestEveryFaultIsDocumented(t *testing.T) {
	doc, err := os.ReadFile("doc.go")
	kit.Must(t, err)
	for _, f := range faults.All() {
		if f.Does == "" || f.Expect == "" || f.Syntax == "" {
			t.Errorf("fault %s: description is missing", f.Name)
		}
		if !strings.Contains(string(doc), "//   - "+f.Name+"="+f.Syntax+": ") {
			t.Errorf("doc.go does not describe %s=%s", f.Name, f.Syntax)
		}
		if !strings.Contains(allFaults, ","+f.Name+"=") {
			t.Errorf("allFaults does not contain %s", f.Name)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"", allFaults, "seed=1,post-fail=~50:*", "credits=1,credits=2", "late-write=1:1h,=,~"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, spec string) {
		p, err := faults.Parse(spec)
		if err != nil {
			return
		}
		again, err := faults.Parse(p.String())
		if err != nil || *again != *p {
			t.Fatalf("print plan %q: got %q, which parses as %v, %v", spec, p, again, err)
		}
	})
}
