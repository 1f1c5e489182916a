package verbstest

var endingTests []conformanceTest
